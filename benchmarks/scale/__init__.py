"""What one trainer takes in, and what many loaders cost the cluster's coordinator: see `python -m benchmarks.scale`."""
