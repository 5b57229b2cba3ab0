"""The HTTP server of the endpoint and what it serves."""
