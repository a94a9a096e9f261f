"""Collectives of ranks, over gloo, NCCL or the coordinator, and averaging on top of them."""
