"""The command `dpex`."""
