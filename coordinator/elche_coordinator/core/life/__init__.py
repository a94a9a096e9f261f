"""What a training and a loop have in common: a phase, ranks, an outcome, and ranks that fall silent."""
