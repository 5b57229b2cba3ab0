"""Find the code that draws random numbers, by comparing the states of the generators that it may draw from. This module
draws nothing.

The generators are the global ones, the dataset's own, and global variables of the functions that run. A function that
returns the seed of the batch, or seeds a generator from the system's entropy, counts as a draw. A generator that a
sample makes from a fixed seed does not count, because its numbers are the same in each epoch.
"""

from __future__ import annotations

import contextlib
import pickle
import random
from itertools import islice
from types import CodeType, FrameType
from typing import Any

import numpy as np
import torch

from dpex.worker.batch_seeding import batch_seed
from dpex.worker.kept_states import words_of
from dpex.worker.own_generators import is_own_generator, own_generators
from dpex.worker.states import GLOBAL

_MOST = 16
"""Maximum number of generators, besides the global ones, whose states are compared: reading a state takes up to 50 µs,
and each call needs two comparisons."""


def state_mark(generator: Any) -> Any:
    """Return a value that changes once the generator is drawn from."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    if isinstance(generator, random.Random):
        return hash(generator.getstate())
    bits = generator._bit_generator if isinstance(generator, np.random.RandomState) else None
    if type(bits) is np.random.MT19937:
        return words_of(bits)
    is_new = isinstance(generator, np.random.Generator)
    state = generator.bit_generator.state if is_new else generator.get_state(legacy=False)
    inner = state["state"]
    return (inner["pos"], inner["key"].tobytes()) if "pos" in inner else pickle.dumps(state)


def global_marks() -> tuple[Any, ...]:
    """Return a value that changes once a global generator of Python, NumPy or torch is drawn from."""
    return tuple(map(state_mark, GLOBAL.values()))


_SOURCES: dict[Any, dict[str, Any]] = {
    batch_seed.__code__: {},
    torch.initial_seed.__code__: {},
    random.Random.seed.__code__: {"a": None},
}
"""Code of functions whose calls count as draws, with the argument values for which they do."""


class GeneratorDraws:
    """The generators that a dataset may draw from, and their states at the last comparison."""

    def __init__(self, dataset: Any) -> None:
        found = (*GLOBAL.values(), *(one for _, one in islice(own_generators(dataset, None), _MOST)))
        self._generators: dict[int, Any] = {}
        self._marks: dict[int, Any] = {}
        self._met: set[CodeType] = set()
        for one in found:
            self._add(one)

    def _add(self, generator: Any) -> None:
        if id(generator) not in self._generators and len(self._generators) < len(GLOBAL) + _MOST:
            with contextlib.suppress(Exception):  # a bit generator may have no state
                self._marks[id(generator)] = state_mark(generator)
                self._generators[id(generator)] = generator

    def __call__(self, begins: FrameType | None, compares: bool) -> bool:
        """Return True if random numbers were drawn: a generator has changed since the last comparison, or the call with
        the frame ``begins`` returns the seed of the batch or seeds a generator from the system's entropy."""
        is_source = False
        if begins is not None:
            named = _SOURCES.get(begins.f_code)
            is_source = named is not None and all(begins.f_locals.get(name, self) is one for name, one in named.items())
            self._meet(begins)
        if not compares:
            return is_source
        before, self._marks = self._marks, {key: state_mark(one) for key, one in self._generators.items()}
        return is_source or any(self._marks[key] != mark for key, mark in before.items())

    def _meet(self, frame: FrameType) -> None:
        """Add the generators among the global variables that a function uses."""
        if frame.f_code not in self._met:
            self._met.add(frame.f_code)
            for name in frame.f_code.co_names:
                value = frame.f_globals.get(name)
                if value is not None and is_own_generator(value):
                    self._add(value)
