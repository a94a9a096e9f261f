"""Data sets, the order of their samples, and prefetching of batches."""
