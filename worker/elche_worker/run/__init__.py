"""Training that a script starts itself: in this process, or with a coordinator of its own."""
