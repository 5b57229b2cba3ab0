"""The calls of a batch, recorded as a tree."""
