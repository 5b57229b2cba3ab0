"""Tuning a running loader."""
