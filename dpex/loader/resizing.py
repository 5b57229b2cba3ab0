"""Other sizes for a loader: by `DpexDataLoader.resize` at once, by assigning ``num_workers`` from the next pass on."""

from __future__ import annotations

from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError
from dpex.loader.sizing import size_options
from dpex.system.user_warnings import warn

WORKERS_STAY = (
    "resize() to {local} local and {remote} remote workers takes effect with the next iterator. Under "
    "seeding='worker', and for iterable datasets, the workers of a running iterator stay where they are; with "
    "persistent_workers=True, all epochs have the same iterator."
)


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
    engines = [iterator._engine for iterator in list(loader._runtime.iterators)]
    has_moved = (sizes.local, sizes.remote) != (now.local, now.remote)
    if has_moved and options.are_workers_fixed and not all(engine.closed for engine in engines):
        warn(WORKERS_STAY.format(local=sizes.local, remote=sizes.remote))
    for engine in engines:
        engine.resize(sizes)


def fix_workers(loader: Any, count: Any) -> None:
    """``loader.num_workers`` is about to be set: the number holds from the next ``iter()`` on, and nothing is tuned.

    Raises:
        OptionError: The number is a word.
    """
    if isinstance(count, str):
        raise OptionError(
            f"loader.num_workers = {count!r}: assign a whole number; to have the number tuned, make the loader with "
            "num_workers='auto'"
        )
    if size_options(loader).is_tuned:
        warn(
            f"num_workers={count} was assigned to a loader that is tuned. It has that many workers from the next "
            "iter() on, and nothing is tuned any more. To limit the tuning instead, make the loader with "
            f"num_workers='auto', autotune=AutotuneConfig(max_local={count})",
            UserWarning,
        )
    loader._is_auto = False
    if isinstance(loader.autotune, AutotuneConfig):
        loader.autotune = False
    loader._sizes, loader._pins = None, {}
    loader._runtime.dismiss_tuner()
