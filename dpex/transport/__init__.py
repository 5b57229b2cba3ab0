"""How batches travel: encoding, shared memory, and parcels of Python objects."""
