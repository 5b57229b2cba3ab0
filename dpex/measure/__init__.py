"""Where the training loop's time goes, and how it is sampled."""
