"""Batches on their way from host memory to a device."""
