"""What training comes to: committed work, metrics, evaluations, checkpoints."""
