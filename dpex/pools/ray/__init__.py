"""The worker pool of a Ray cluster."""
