"""Places where tickets are turned into batches."""
