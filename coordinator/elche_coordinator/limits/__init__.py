"""Bounds on what callers use."""
