"""A tuning run on record: its format, and its explanation."""
