"""The worker pool of this machine."""
