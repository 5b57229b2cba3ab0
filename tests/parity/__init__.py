"""Parity with torch: one script, run on torch's DataLoader and on ours, must have one outcome."""
