"""The HTTP server of the endpoint, and its pages."""
