"""What is exported: metrics, timelines, journals."""
