"""The coordinator's HTTP server: health, metrics, and the page on which people watch jobs."""
