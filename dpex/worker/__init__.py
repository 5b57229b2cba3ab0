"""What happens inside a worker: seed, load, collate, time."""
