"""Worker pools: the places where batches are made."""
