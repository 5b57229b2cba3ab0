"""Derive a verdict, evidence, predictions and a report from measurements. Pure, except `diagnosis` and `gathering`."""
