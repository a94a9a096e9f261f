"""What a user writes: the job and its functions, and what these functions are given."""
