"""Worker pools, which make batches on this machine and on others."""
