"""The life of a job, from its submission to its result."""
