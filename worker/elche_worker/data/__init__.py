"""Data sets, the order of their samples, and prefetching of batches.

A lease of the coordinator comes to `reserve` until it may be trained; `lease_loader` then fetches its samples
(`fetching`), and `prefetch` moves the batches to the device.
"""
