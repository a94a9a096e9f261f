"""Results of training: committed work, metrics, evaluations, checkpoints."""
