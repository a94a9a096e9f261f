"""Conversations with agents, ranks and clients."""
