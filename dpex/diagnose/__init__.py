"""Measurements → verdict, evidence, predictions, report. Pure but for `book`, which collects."""
