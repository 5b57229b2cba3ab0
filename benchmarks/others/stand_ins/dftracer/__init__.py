"""Stands in for DLIO's tracer; see `logger`."""
