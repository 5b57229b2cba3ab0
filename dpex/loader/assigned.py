"""What follows when an attribute of a loader is set after the loader was made."""

from __future__ import annotations

from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError
from dpex.loader.origin import OPTION_NAMES, carrying, plain
from dpex.loader.sizing import size_options
from dpex.system.user_warnings import warn


def assigned(loader: Any, name: str, value: Any) -> Any:
    """What the attribute is to be; what is made from the loader later gets the new value, too.

    Raises:
        OptionError: ``num_workers`` is set to a word.
    """
    if name == "num_workers":
        _fix_workers(loader, value)
        return plain(value)
    if name == "timeout":
        return carrying(plain(value), loader._origin)
    if name == "in_order":
        loader._origin.in_order = value
    if name in OPTION_NAMES:
        loader._origin.options[name] = value
    return value


def _fix_workers(loader: Any, value: Any) -> None:
    """Whoever sets a number later means it: from the next ``iter()`` on it holds, and nothing is tuned."""
    if isinstance(value, str):
        raise OptionError(
            f"loader.num_workers = {value!r}: assign a whole number; to have the number tuned, make the loader with "
            "num_workers='auto'"
        )
    if size_options(loader).is_tuned:
        warn(
            f"num_workers={value} was assigned to a loader that is tuned. It has that many workers from the next "
            "iter() on, and nothing is tuned any more. To limit the tuning instead, make the loader with "
            f"num_workers='auto', autotune=AutotuneConfig(max_local={value})",
            UserWarning,
        )
    loader.auto_workers = loader._origin.is_auto = False
    loader._origin.workers = value
    if isinstance(loader.autotune, AutotuneConfig):
        loader.autotune = False
    loader._sizes, loader._pins = None, {}
    loader._runtime.dismiss_tuner()
