"""PyTorch's own DataLoader, counted and reported on."""
