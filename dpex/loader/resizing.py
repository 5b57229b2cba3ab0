"""`DpexDataLoader.resize`: other sizes for a loader and for its iterators that run."""

from __future__ import annotations

from typing import Any

from dpex.loader.sizing import size_options


def resize(loader: Any, local: int | None, remote: int | None, prefetch: int | None) -> None:
    """See `dpex.DpexDataLoader.resize`."""
    options = size_options(loader)
    now = loader._current_sizes(options)
    fixed = options.fixed_by_resize(now, local, remote, prefetch)
    sizes = options.resized(now, fixed)
    tuner = loader._tuning(options)
    if tuner is not None:
        loader._pins |= fixed
        tuner.pin(loader._pins)
        sizes = tuner.sizes
    else:
        loader._sizes = sizes
    for iterator in list(loader._runtime.iterators):
        iterator._engine.resize(sizes)
