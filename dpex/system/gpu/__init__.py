"""The GPU seen from outside the training code: how long it waited for data, and what NVML says of it."""
