"""Worker pools of this machine, with real processes."""
