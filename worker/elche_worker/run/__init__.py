"""Training that a script starts: in its own process, or with its own coordinator."""
