"""Samples: data sets, their order, and how batches are fetched ahead."""
