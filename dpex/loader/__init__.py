"""Parts of `dpex.DpexDataLoader`: its settings, what it keeps while it is used, and what a pass is made of."""
