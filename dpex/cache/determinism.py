"""Find out if preparing a sample is random, by preparing it twice, under different seeds of all known generators."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from dpex.cache.encoding import is_same
from dpex.worker.batch_seeding import call_seeded
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.states import KeptStates

SEEDS = (0x1234_5678_5EED_0001, 0x2345_6789_5EED_0002)


def drawn_from() -> tuple[Any, ...]:
    """Return a value that changes once a global generator of Python, NumPy or torch is drawn from."""
    bits: Any = np.random.get_bit_generator()  # type: ignore[attr-defined]
    state = bits.state
    inner = state["state"]
    numpys = (inner["pos"], inner["key"].tobytes()) if "key" in inner else repr(state)
    return hash(random.getstate()), numpys, torch.default_generator.get_state().numpy().tobytes()


def prepared_twice(prepare: Callable[[], Any], prepared_by: Any) -> tuple[Any, bool]:
    """Prepare a sample under two seeds. Return the first result, and True if it is random.

    It is random if the results differ in any bit, or if a generator was drawn from: a global one, or one that lies in
    ``prepared_by``. All generators are afterwards as they were.
    """
    own = OwnGenerators(prepared_by, None)
    kept, states = KeptStates(own), own.states()
    try:
        (first, drew), (second, drew_again) = (_under(seed, prepare) for seed in SEEDS)
        drew_own = not is_same(own.states(), states)
    finally:
        kept.put_back()
    return first, drew or drew_again or drew_own or not is_same(first, second)


def random_step(steps: Sequence[Callable[[Any], Any]], value: Any) -> int | None:
    """Return the number of the first step that is random when the steps are applied to ``value`` in turn; else None."""
    for number, step in enumerate(steps):
        value, is_random = prepared_twice(lambda step=step, value=value: step(value), step)  # type: ignore[misc]
        if is_random:
            return number
    return None


def _under(seed: int, prepare: Callable[[], Any]) -> tuple[Any, bool]:
    def prepared(_: None) -> tuple[Any, bool]:
        before = drawn_from()
        return prepare(), drawn_from() != before

    return call_seeded(seed, prepared, None)
