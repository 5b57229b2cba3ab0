"""The law for the number of workers and the prefetch: its measurements, its model, and its decisions. PURE."""
