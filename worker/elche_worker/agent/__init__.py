"""One process for each host: offers its devices, starts rank processes on them, and tells how they end."""
