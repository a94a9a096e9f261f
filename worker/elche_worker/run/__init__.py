"""Training that a script starts itself: in its own process, or with its own coordinator."""
