"""States of random generators, of datasets and samplers, and the state of a logical worker that is made of them.

States of generators of Python, NumPy and torch are read and set by their public functions. They consist of numbers,
strings, lists, dicts and tensors. So they can travel between processes, and `torch.save` and
``torch.load(weights_only=True)`` accept them. The three *global* generators are `random`'s, NumPy's legacy one and
torch's CPU one.

Workers report the state of a logical worker now and then as a pickle, from which a dead worker is restarted. A
checkpoint holds no pickles, but the plain values that these contain (`dpex.loader.states`).

``state_dict()`` is the user's code, which may be slow, warn or fail. So it is called only after a state of the loader
was asked for or loaded.
"""

from __future__ import annotations

import inspect
import pickle
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from dpex.schedule.names import attribute
from dpex.system.clock import monotonic

RandomStates = dict[str, Any]
"""States of global generators by their names in `GLOBAL`."""
GLOBAL: dict[str, Any] = {
    "python": random.seed.__self__,  # type: ignore[attr-defined]
    "numpy": np.random.mtrand._rand,
    "torch": torch.default_generator,
}


def generator_state(generator: Any) -> Any:
    """Return the state of a ``random.Random``, ``np.random.Generator``, ``np.random.RandomState`` or
    ``torch.Generator``."""
    if isinstance(generator, random.Random):
        version, words, gauss = generator.getstate()
        return [version, list(words), gauss]
    if isinstance(generator, np.random.Generator):
        return plain(generator.bit_generator.state)
    if isinstance(generator, np.random.RandomState):
        return plain(generator.get_state(legacy=False))
    return generator.get_state()


def set_generator_state(generator: Any, state: Any) -> None:
    """Set the generator to a state that `generator_state` returned for a generator of the same kind. The libraries'
    errors are raised."""
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)  # a list of words takes a tenth of the time that an array takes
    else:
        generator.set_state(state)


def plain(value: Any) -> Any:
    """Return ``value`` with its NumPy arrays and numbers converted to Python lists and numbers."""
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def global_states(names: Iterable[str] = GLOBAL) -> RandomStates:
    return {name: generator_state(GLOBAL[name]) for name in names}


def set_global_states(states: Mapping[str, Any]) -> None:
    for name, state in states.items():
        set_generator_state(GLOBAL[name], state)


def check_global_states(states: Mapping[str, Any]) -> None:
    """Raise the errors of `set_global_states` without changing the global generators."""
    scratch = {"python": random.Random(0), "numpy": np.random.RandomState(0), "torch": torch.Generator()}
    for name, state in states.items():
        set_generator_state(scratch[name], state)


# -- datasets and logical workers --------------------------------------------------------------------------------------

RngState = bytes
"""A pickled `LogicalState`, whose `DatasetState` is in plain values."""


def is_stateful(thing: Any) -> bool:
    """Return True if ``thing`` has a ``state_dict()`` that takes no argument and a ``load_state_dict(state)``.

    Methods of these names with other arguments have another meaning than in ``torchdata``: litdata's ``state_dict``
    takes three, and is for its own loader.
    """
    return _takes(attribute(thing, "state_dict"), 0) and _takes(attribute(thing, "load_state_dict"), 1)


def _takes(method: Any, count: int) -> bool:
    """Return True if ``method`` can be called with ``count`` positional arguments, as far as that is known."""
    if not callable(method):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # compiled code has no signature
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def state_of(thing: Any) -> Any:
    """Return the ``state_dict()`` of a dataset, iterator or sampler; None if it has none."""
    return thing.state_dict() if is_stateful(thing) else None


def load_state(thing: Any, state: Any) -> None:
    if state is not None and is_stateful(thing):
        thing.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """State of the dataset of a logical worker.

    ``iterator`` is the ``state_dict()`` of the dataset's iterator. ``dataset`` is the ``state_dict()`` of the dataset,
    or None if the dataset is its own iterator. If there is no state, the first ``skip`` batches are read again, each
    with ``index``, and dropped.
    """

    epoch: int = 0
    dataset: Any = None
    iterator: Any = None
    has_ended: bool = False
    skip: int = 0
    index: Any = None


class LogicalState(NamedTuple):
    """State of a logical worker. A missing part (None) has its initial state.

    ``own``: states of the generators in the dataset, by path (`OwnGenerators`).
    """

    random: RandomStates | None = None
    dataset: DatasetState | None = None
    own: dict[str, Any] | None = None


def pack_state(state: LogicalState) -> RngState:
    dataset = None if state.dataset is None else vars(state.dataset)
    return pickle.dumps((state.random, dataset, state.own or None), 5)


def unpack_state(packed: RngState) -> LogicalState:
    states, dataset, own = pickle.loads(packed)
    return LogicalState(states, None if dataset is None else DatasetState(**dataset), own)


# -- how often ---------------------------------------------------------------------------------------------------------

_SNAPSHOT_S = 0.25
"""Seconds between states of a logical worker, unless the loader gives a number of batches."""
_SNAPSHOT_TICKETS = 1024
"""Maximum number of batches between states of a logical worker. These batches are made again after its death."""
_SNAPSHOT_SHARE = 0.02
"""Maximum share of a worker's time that snapshots take if the user has not set their pace."""


class SnapshotPace:
    """Decides when each logical worker reports its state: after ``every`` tickets or, if that is None, after a time.
    The time grows with the cost of a report."""

    def __init__(self, every: int | None) -> None:
        self._every = every
        self._told: dict[int, tuple[float, int]] = {}
        self._longest_s = 0.0

    def is_due(self, logical: int, made: int) -> bool:
        """Return True if a report is due, after ``made`` further tickets."""
        now = monotonic()
        at, since = self._told.setdefault(logical, (now, 0))
        since += made
        is_long = since >= _SNAPSHOT_TICKETS or now - at > _SNAPSHOT_S
        is_due = since >= self._every if self._every else is_long and self._longest_s <= _SNAPSHOT_SHARE * (now - at)
        self._told[logical] = (now, 0) if is_due else (at, since)
        return is_due

    def took(self, seconds: float) -> None:
        self._longest_s = max(self._longest_s, seconds)
