"""dpex in training frameworks: reach it from their loaders, and log what it measures by their own means."""
