"""The devices of a host: which can be used, their streams, and how batches get there."""
