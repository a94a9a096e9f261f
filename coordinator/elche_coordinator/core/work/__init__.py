"""Which samples are free, leased and committed."""
