"""What the kernel is asked about processes: to end them with their parents, and to show their stacks."""
