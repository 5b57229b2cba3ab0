"""Random states from which samplers draw their order, and the rest of an order for a run that resumes within it.

torch's samplers draw their order at once, from a generator of their own or from torch's global one. So the states
before the first draw and the number of delivered batches describe a pass. A run that resumes skips the delivered
batches without reading any data.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpex.schedule.probing import attribute
from dpex.system.interrupts import taken
from dpex.worker.states import GLOBAL, global_states, set_global_states

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_DRAWLESS = (BatchSampler, SequentialSampler, DistributedSampler, list, tuple, range, np.ndarray)
_TORCH = ("torch",)
_DEEPEST = 5
"""The most samplers within each other that are looked at."""


def samplers_within(index_sampler: Any) -> Iterator[tuple[str, Any]]:
    """Return the sampler of batches, then the sampler that it draws from, and so on, each with a name."""
    name, sampler = "sampler", index_sampler
    for _ in range(_DEEPEST):
        if sampler is None:
            return
        yield name, sampler
        inner = attribute(sampler, "batch_sampler")
        name, sampler = f"{name}.sampler", attribute(sampler, "sampler") if inner is None else inner


def generators_of(index_sampler: Any, generator: Any) -> dict[str, torch.Generator]:
    """Return the generators that a loader and its samplers have for themselves, each once, by name."""
    named = [("loader", generator)]
    named += [(name, attribute(sampler, "generator")) for name, sampler in samplers_within(index_sampler)]
    found = {id(each): (name, each) for name, each in reversed(named) if isinstance(each, torch.Generator)}
    return dict(reversed(found.values()))


@dataclass(frozen=True, kw_only=True)
class SamplerStart:
    """Random states before the first draw of a pass."""

    generators: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """States of generators that loader and samplers have for themselves, by name."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Epochs of samplers that have ``set_epoch``, by name."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """States of the global generators from which a sampler may draw, by name."""

    @classmethod
    def now(
        cls, index_sampler: Any, generator: Any, *, is_stream: bool = False, for_iterator: bool = False
    ) -> SamplerStart:
        """Return the present states. ``for_iterator``: an iterator that is made next draws its base seed there, too."""
        draws = for_iterator and generator is None
        own = {name: each.get_state() for name, each in generators_of(index_sampler, generator).items()}
        if is_stream:
            return cls(generators=own, shared=global_states(_TORCH if draws else ()))
        samplers = [sampler for _, sampler in samplers_within(index_sampler)]
        is_known = all(type(sampler) in _DRAWING + _DRAWLESS for sampler in samplers)
        draws = draws or any(type(sampler) in _DRAWING and sampler.generator is None for sampler in samplers)
        names = (_TORCH if draws else ()) if is_known else GLOBAL
        return cls(generators=own, epochs=_epochs_of(index_sampler), shared=global_states(names))

    def apply_own(self, index_sampler: Any, generator: Any) -> None:
        """Set the generators of loader and samplers, and the samplers' epochs, to these states."""
        for name, each in generators_of(index_sampler, generator).items():
            if name in self.generators:
                each.set_state(self.generators[name])
        for name, sampler in samplers_within(index_sampler):
            if name in self.epochs and callable(attribute(sampler, "set_epoch")):
                sampler.set_epoch(self.epochs[name])

    @property
    def is_now(self) -> bool:
        """True if torch's global generator is as it was, or does not matter."""
        return "torch" not in self.shared or torch.equal(torch.get_rng_state(), self.shared["torch"])

    @contextmanager
    def global_states(self) -> Iterator[None]:
        """Set the global generators to these states for a ``with`` block, and put them back afterwards.

        If they have these states already, no number was drawn yet, and they keep the state that the block leaves.
        """
        if self.is_now and "python" not in self.shared:
            yield
            return
        before = global_states(self.shared)
        try:
            set_global_states(self.shared)
            yield
        finally:
            set_global_states(before)


def _epochs_of(index_sampler: Any) -> dict[str, int]:
    told = {
        name: sampler for name, sampler in samplers_within(index_sampler) if callable(attribute(sampler, "set_epoch"))
    }
    return {name: each.epoch for name, each in told.items() if isinstance(attribute(each, "epoch"), int)}


class FirstDraw:
    """The iterator of a sampler. It calls ``note`` before the first draw."""

    def __init__(self, sampler: Iterator[Any], note: Callable[[], None]) -> None:
        self._sampler = sampler
        self._note: Callable[[], None] | None = note

    def __iter__(self) -> FirstDraw:
        return self

    def __next__(self) -> Any:
        if self._note is not None:
            note, self._note = self._note, None
            note()
        return next(self._sampler)


def begun(sampler: Iterator[Any]) -> Iterator[Any]:
    """Draw the first item of ``sampler``. Return an iterator over that item and the rest."""
    return chain(list(taken(sampler, 1)), taken(sampler))


class _Given:
    """A sampler that returns a given iterator."""

    def __init__(self, samples: Iterator[Any]) -> None:
        self._samples = samples

    def __iter__(self) -> Iterator[Any]:
        return self._samples


def rest_of(index_sampler: Any, first: int) -> Iterator[Any]:
    """Return the indices of batches from ``first`` on, drawn from the present random states."""
    if type(index_sampler) is not BatchSampler:
        return begun(passed_over(iter(index_sampler), first))
    size, sampler = index_sampler.batch_size, index_sampler.sampler
    if type(sampler) is SequentialSampler:
        samples: Iterator[Any] = iter(range(first * size, len(sampler.data_source)))
    else:
        samples = passed_over(iter(sampler), first * size)
    batches: Any = BatchSampler(_Given(taken(samples)), size, index_sampler.drop_last)
    return begun(iter(batches))


def passed_over(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Return ``items`` after skipping ``count`` of them."""
    deque(taken(items, count), maxlen=0)
    return items


@contextmanager
def undrawn(generator: torch.Generator | None) -> Iterator[None]:
    """Put a loader's generator, or torch's global one, back after a ``with`` block."""
    source = torch.default_generator if generator is None else generator
    before = source.get_state()
    try:
        yield
    finally:
        source.set_state(before)
