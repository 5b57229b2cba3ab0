"""Drives one pass over the data."""
