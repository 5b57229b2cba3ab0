"""States of random generators of Python, NumPy and torch as plain values, read and set by their public functions.

A state consists of numbers, strings, lists, dicts and tensors. So it can travel between processes, and `torch.save` and
``torch.load(weights_only=True)`` accept it. The three *global* generators are `random`'s, NumPy's legacy one and
torch's CPU one.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    from dpex.worker.own_generators import OwnGenerators

RandomStates = dict[str, Any]
"""States of global generators by their names in `GLOBAL`."""
GLOBAL: dict[str, Any] = {
    "python": random.seed.__self__,  # type: ignore[attr-defined]
    "numpy": np.random.mtrand._rand,
    "torch": torch.default_generator,
}
_numpy_random: Any = np.random


def state_of(generator: Any) -> Any:
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


def set_state(generator: Any, state: Any) -> None:
    """Set the generator to what `state_of` returned of one of the same kind. Errors of the libraries pass through."""
    if isinstance(generator, random.Random):
        version, words, gauss = state
        generator.setstate((version, tuple(words), gauss))
    elif isinstance(generator, np.random.Generator):
        generator.bit_generator.state = state
    elif isinstance(generator, np.random.RandomState):
        generator.set_state(state)  # with a list of words it takes a tenth of the time that an array takes
    else:
        generator.set_state(state)


def plain(value: Any) -> Any:
    """Return ``value`` with the arrays and numbers of NumPy in it as lists and numbers of Python."""
    if type(value) is dict:
        return {key: plain(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(plain, value))
    return value.tolist() if isinstance(value, (np.ndarray, np.generic)) else value


def global_states(names: Iterable[str] = GLOBAL) -> RandomStates:
    """Return the states of these global generators."""
    return {name: state_of(GLOBAL[name]) for name in names}


def set_global_states(states: Mapping[str, Any]) -> None:
    """Set global generators to what `global_states` returned."""
    for name, state in states.items():
        set_state(GLOBAL[name], state)


def check_global_states(states: Mapping[str, Any]) -> None:
    """Raise what `set_global_states` would raise, and leave the global generators alone."""
    scratch = {"python": random.Random(0), "numpy": np.random.RandomState(0), "torch": torch.Generator()}
    for name, state in states.items():
        set_state(scratch[name], state)


class KeptStates:
    """The global generators, and those of a dataset, as they are now, to be put back later in this process.

    It includes NumPy's bit generator, which `seed_ticket` and datasets may replace.
    """

    def __init__(self, own: OwnGenerators | None = None) -> None:
        self._bits = _numpy_random.get_bit_generator()
        self._states = global_states()
        self._own = own
        self._own_states = own.states() if own else {}

    def put_back(self) -> None:
        """Set the generators to the kept states. It may be called again."""
        if _numpy_random.get_bit_generator() is not self._bits:
            _numpy_random.set_bit_generator(self._bits)
        set_global_states(self._states)
        if self._own:
            self._own.restore(self._own_states)
