"""The core's records of ranks, hosts and rounds, with their phases."""
