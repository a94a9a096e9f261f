"""The launch of a rank, and its stream with the coordinator."""
