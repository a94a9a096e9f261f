"""Package of the rank process."""
