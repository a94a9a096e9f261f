"""What ranks do together: all-reduce over gloo, NCCL or the coordinator, and averaging on top of it."""
