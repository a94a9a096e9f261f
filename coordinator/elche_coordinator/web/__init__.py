"""What the coordinator serves over HTTP: its health, its metrics, and the page on which people look at jobs."""
