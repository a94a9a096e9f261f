"""The model of one process: building, stepping, memory layout and storage."""
