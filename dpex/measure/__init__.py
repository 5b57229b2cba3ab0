"""The times of batches, the time of the training loop, and the cause of each wait."""
