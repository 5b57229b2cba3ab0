"""The state of a logical worker: its random states, the state of its dataset, and how far its stream is.

Workers report it now and then as a pickle, from which a dead worker is restarted. A checkpoint holds no pickles, but
the plain values in it (`dpex.loader.plain_states`).
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

from dpex.worker.own_states import OwnStates
from dpex.worker.rng_state import RandomStates

RngState = bytes
"""A pickled `LogicalState`, whose `DatasetState` is in plain values."""


@dataclass(frozen=True, kw_only=True)
class DatasetState:
    """Of what a logical worker reads.

    epoch: the pass that it is in. dataset, iterator: states of their own; None: it has none, or, for a dataset that is
    its own iterator, it is the other. has_ended: the stream has no more. skip: batches of a stream without a state that
    are made and thrown away; index: what each of them was asked for.
    """

    epoch: int = 0
    dataset: Any = None
    iterator: Any = None
    has_ended: bool = False
    skip: int = 0
    index: Any = None


class LogicalState(NamedTuple):
    """Of a logical worker; what is None is as at the start.

    random: of the global generators. dataset: of what it reads, where that tells. own: of generators that lie in the
    dataset.
    """

    random: RandomStates | None = None
    dataset: DatasetState | None = None
    own: OwnStates | None = None


def pack_state(state: LogicalState) -> RngState:
    """Return the state as a pickle."""
    dataset = None if state.dataset is None else vars(state.dataset)
    return pickle.dumps((state.random, dataset, state.own or None), 5)


def unpack_state(packed: RngState) -> LogicalState:
    """Return the state that `pack_state` pickled."""
    states, dataset, own = pickle.loads(packed)
    return LogicalState(states, None if dataset is None else DatasetState(**dataset), own)
