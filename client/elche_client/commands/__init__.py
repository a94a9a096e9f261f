"""What the commands do: with a coordinator's jobs (`remote`), earlier trainings, sweeps, plans, tokens."""
