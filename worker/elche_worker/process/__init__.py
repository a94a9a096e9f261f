"""Operating system processes: they end with their parents, and show the stacks of their threads."""
