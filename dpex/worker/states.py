"""States of datasets and samplers, and the state of a logical worker that is made of them.

Workers report the state of a logical worker now and then as a pickle, from which a dead worker is restarted. A
checkpoint holds no pickles, but the plain values in it (`dpex.loader.states`).

``state_dict()`` is the user's code, which may be slow, warn or fail. So it is called only after a state of the loader
was asked for or loaded.
"""

from __future__ import annotations

import inspect
import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpex.schedule.probing import attribute
from dpex.worker.rng_state import RandomStates

RngState = bytes
"""A pickled `LogicalState`, whose `DatasetState` is in plain values."""


def is_stateful(thing: Any) -> bool:
    """Return True if it has a ``state_dict()`` that takes no argument and a ``load_state_dict(state)``.

    Methods of these names with other arguments are not those of ``torchdata``: litdata's ``state_dict`` takes three,
    and is for its own loader.
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
    """Give ``thing`` a state that `state_of` returned."""
    if state is not None and is_stateful(thing):
        thing.load_state_dict(state)


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """State of the dataset of a logical worker.

    Attributes:
        epoch: The pass that it is in.
        dataset: ``state_dict()`` of the dataset; None if it has none, or is its own iterator.
        iterator: ``state_dict()`` of its iterator, or None.
        has_ended: The stream has no more samples.
        skip: Batches of a stream without a state that are made again and dropped.
        index: The index that each of the skipped batches is fetched with.
    """

    epoch: int = 0
    dataset: Any = None
    iterator: Any = None
    has_ended: bool = False
    skip: int = 0
    index: Any = None


class LogicalState(NamedTuple):
    """State of a logical worker; a part that is None is as at the start.

    Attributes:
        random: States of the global generators.
        dataset: State of its dataset, if the dataset reports one.
        own: States of generators that lie in the dataset, by the names of their places.
    """

    random: RandomStates | None = None
    dataset: DatasetState | None = None
    own: dict[str, Any] | None = None


def pack_state(state: LogicalState) -> RngState:
    """Return the state as a pickle."""
    dataset = None if state.dataset is None else vars(state.dataset)
    return pickle.dumps((state.random, dataset, state.own or None), 5)


def unpack_state(packed: RngState) -> LogicalState:
    """Return the state that `pack_state` pickled."""
    states, dataset, own = pickle.loads(packed)
    return LogicalState(states, None if dataset is None else DatasetState(**dataset), own)
