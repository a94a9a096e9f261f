"""Loops of the user's own: their processes are there already, and report what they do."""
