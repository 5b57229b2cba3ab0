"""The two parts of a stream whose samples are read by some workers and decoded by others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

Decode = Callable[[Iterator[Any]], Iterable[Any]]
"""Makes of samples other samples, one of each, in order."""


class Split(NamedTuple):
    """``source`` is iterated by the workers that read, and ``decode`` called by those that decode."""

    source: Iterable[Any]
    decode: Decode
