"""Records, models and logs of jobs that have ended."""
