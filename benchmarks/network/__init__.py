"""Remote workers behind links of a given rate, delay and loss on one machine, for the tests of the long tier."""
