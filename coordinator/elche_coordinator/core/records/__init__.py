"""What the core keeps of ranks, hosts and rounds: one record each, with its phase."""
