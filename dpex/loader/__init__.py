"""Parts of `dpex.DpexDataLoader`: its sizes, what it keeps while it is used, and what a pass is made of."""
