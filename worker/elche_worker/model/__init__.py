"""The model of one process: how it is built, stepped, laid out in memory and stored."""
