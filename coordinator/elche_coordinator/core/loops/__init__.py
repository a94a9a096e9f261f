"""User-owned loops: their processes run already, and report their progress."""
