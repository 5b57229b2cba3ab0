"""dpex in training frameworks, with their own packages."""
