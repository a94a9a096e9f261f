"""Exports: metrics, timelines, journals."""
