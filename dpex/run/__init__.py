"""Running unmodified scripts with dpex, and diagnosing PyTorch's own loader."""
