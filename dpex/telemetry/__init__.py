"""Telemetry: what is measured, and how it is exported."""
