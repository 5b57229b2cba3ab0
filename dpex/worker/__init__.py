"""The code inside a worker: seed, load, collate, time, streams, and samples that fail."""
