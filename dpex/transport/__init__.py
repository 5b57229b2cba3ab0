"""Transport of batches: encoding, shared memory, frames, and pickles of datasets."""
