"""The steps of a dataset, found and timed."""
