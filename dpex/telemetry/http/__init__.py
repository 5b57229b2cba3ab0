"""The HTTP server and what it serves."""
