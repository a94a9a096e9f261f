"""How a rank is launched, and its stream with the coordinator."""
