"""Benchmarks of others, unchanged, with PyTorch's loader and with dpex behind it."""
