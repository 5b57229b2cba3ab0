"""Remote workers behind links of a given rate, delay and loss, on one machine. See `__main__`."""
