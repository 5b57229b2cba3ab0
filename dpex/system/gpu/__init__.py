"""Measurements of the GPU from outside the training code: its waits for data, and readings of NVML."""
