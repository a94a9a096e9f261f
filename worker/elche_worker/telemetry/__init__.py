"""Measurements of a training process: batch times, sums of losses, device gauges and the timeline."""
