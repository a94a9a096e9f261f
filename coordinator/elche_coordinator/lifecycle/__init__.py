"""Start, leadership, standby, stop and backup of a coordinator."""
