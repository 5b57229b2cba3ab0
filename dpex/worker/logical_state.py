"""The state of a logical worker as it travels: its random state, that of its dataset, and how far its stream is.

It goes between processes of one run as a pickle, as batches and datasets do. What is kept in checkpoints is made from
it elsewhere (`dpex.loader.plain_states`), and holds no pickles.
"""

from __future__ import annotations

import pickle
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

RngState = bytes
"""Pickled states of `random`, numpy's and torch's global generators, and maybe a `DatasetState` in plain values."""
RandomStates = tuple[Any, Any, bytes]
"""Of `random`, numpy and torch."""


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


def random_states() -> RandomStates:
    """Those of the three global generators."""
    torch_state = torch.default_generator.get_state().numpy().tobytes()
    return random.getstate(), np.random.get_state(legacy=True), torch_state


def pack_state(states: RandomStates | None, dataset: DatasetState | None = None) -> RngState:
    """Make a state of its parts; None: that part is as at the start."""
    python, numpy, torch_state = states or (None, None, None)
    return pickle.dumps((python, numpy, torch_state, None if dataset is None else vars(dataset)), 5)


def unpack_state(state: RngState) -> tuple[RandomStates | None, DatasetState | None]:
    """Take apart what `pack_state` made."""
    python, numpy, torch_state, dataset = pickle.loads(state)
    states = None if torch_state is None else (python, numpy, torch_state)
    return states, None if dataset is None else DatasetState(**dataset)


def get_rng_state() -> RngState:
    """States of the three global generators."""
    return pack_state(random_states())


def set_rng_state(state: RngState) -> None:
    """Restore what `get_rng_state` returned."""
    set_random_states(unpack_state(state)[0])


def set_random_states(states: RandomStates | None) -> None:
    """Restore what `random_states` returned; None leaves the generators as they are."""
    if states is None:
        return
    python, numpy, torch_state = states
    random.setstate(python)
    np.random.set_state(numpy)
    torch.default_generator.set_state(torch.frombuffer(bytearray(torch_state), dtype=torch.uint8))
