"""Common parts of trainings and loops: phase, ranks, outcome, and detection of silent ranks."""
