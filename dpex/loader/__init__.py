"""Parts of `dpex.DpexDataLoader`: its settings, its state while it is used, and the parts of a pass."""
