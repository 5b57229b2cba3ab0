"""The command `dpex bench`."""
