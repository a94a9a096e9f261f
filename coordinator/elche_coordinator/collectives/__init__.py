"""Collectives of ranks through the coordinator: rendezvous, and averaging where they cannot reach each other."""
