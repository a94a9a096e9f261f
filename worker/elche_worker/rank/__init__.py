"""One training process: a session with the coordinator, a loop over batches, and rounds with its peers."""
