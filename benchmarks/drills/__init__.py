"""Faults that are made to happen to a training, and how long it takes until all is as it was. See `__main__`."""
