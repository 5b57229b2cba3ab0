"""The command `dpex replay`."""
