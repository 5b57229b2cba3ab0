"""The samplers of a loader: their random states, and iterators over their indices.

torch's samplers draw their whole order at once, from their own generator or torch's global generator. So the random
states before the first draw and a count of batches describe a position in a pass. `indices_from` finds the position
again without reading data.
"""

from __future__ import annotations

import contextlib
import math
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain, islice, repeat, takewhile
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

from dpex._torch import InfiniteConstantSampler
from dpex.schedule.names import attribute
from dpex.worker.states import GLOBAL, global_states, set_global_states

_DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's samplers that draw from torch's global generator if they have none of their own."""
_SEQUENCES = (list, tuple, range, np.ndarray)
_KNOWN = (BatchSampler, SequentialSampler, DistributedSampler, InfiniteConstantSampler, *_DRAWING, *_SEQUENCES)
_TORCH = ("torch",)
CHUNK = 1 << 16
"""Indices that are converted to Python numbers at a time, which takes 1 ms and 2 MB."""
_DEEPEST = 5
"""Maximum number of nested samplers that are inspected."""


def samplers_within(index_sampler: Any) -> Iterator[tuple[str, Any]]:
    """Yield the sampler of batches, then the sampler that it draws from, and so on, each with a name."""
    name, sampler = "sampler", index_sampler
    for _ in range(_DEEPEST):
        if sampler is None:
            return
        yield name, sampler
        inner = attribute(sampler, "batch_sampler")
        name, sampler = f"{name}.sampler", attribute(sampler, "sampler") if inner is None else inner


def generators_of(index_sampler: Any, generator: Any) -> dict[str, torch.Generator]:
    """Return the generators that belong to a loader or its samplers, each once, by name."""
    named = [("loader", generator)]
    named += [(name, attribute(sampler, "generator")) for name, sampler in samplers_within(index_sampler)]
    found = {id(each): (name, each) for name, each in reversed(named) if isinstance(each, torch.Generator)}
    return dict(reversed(found.values()))


def draws_ahead_safely(sampler: Any) -> bool:
    """Return True for torch's samplers that draw their order at once, so that drawing ahead is not noticed.

    A `RandomSampler` with a generator of its own also draws at its end, which the generator's owner could notice.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.generator is None
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


@dataclass(frozen=True, kw_only=True)
class SamplerStart:
    generators: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """States of the generators that belong to the loader or its samplers, by name."""
    epochs: Mapping[str, int] = field(default_factory=dict)
    """Epochs of samplers that have ``set_epoch``, by name."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """States of the global generators from which a sampler may draw, by name."""

    @classmethod
    def now(
        cls, index_sampler: Any, generator: Any, *, is_stream: bool = False, for_iterator: bool = False
    ) -> SamplerStart:
        """Return the present states. ``for_iterator``: include torch's global generator, from which the next iterator
        draws its base seed if the loader has no generator."""
        draws = for_iterator and generator is None
        own = {name: each.get_state() for name, each in generators_of(index_sampler, generator).items()}
        if is_stream:
            return cls(generators=own, shared=global_states(_TORCH if draws else ()))
        samplers = [sampler for _, sampler in samplers_within(index_sampler)]
        is_known = all(type(sampler) in _KNOWN for sampler in samplers)
        draws = draws or any(type(sampler) in _DRAWING and sampler.generator is None for sampler in samplers)
        names = (_TORCH if draws else ()) if is_known else GLOBAL
        return cls(generators=own, epochs=_epochs_of(index_sampler), shared=global_states(names))

    def apply_generators(self, index_sampler: Any, generator: Any) -> None:
        """Set the generators of loader and samplers to these states."""
        for name, each in generators_of(index_sampler, generator).items():
            if name in self.generators:
                each.set_state(self.generators[name])

    def apply_epochs(self, index_sampler: Any, *, only_later: bool = False) -> None:
        """Set the samplers to these epochs. ``only_later``: keep a later epoch that the user has set."""
        present = _epochs_of(index_sampler)
        for name, sampler in samplers_within(index_sampler):
            if name in self.epochs and name in present and not (only_later and present[name] >= self.epochs[name]):
                sampler.set_epoch(self.epochs[name])

    @property
    def is_now(self) -> bool:
        """True if torch's global generator has the recorded state, or no state of it was recorded."""
        return "torch" not in self.shared or torch.equal(torch.get_rng_state(), self.shared["torch"])

    @contextlib.contextmanager
    def global_states(self) -> Iterator[None]:
        """Set the global generators to these states for a ``with`` block, and restore them afterwards.

        If they have these states already, nothing is restored: numbers drawn in the block stay drawn.
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


# -- indices -----------------------------------------------------------------------------------------------------------


def batches_of(index_sampler: Any, first: int = 0) -> Iterator[list[Any]] | None:
    """Return the batches of torch's `BatchSampler` over one of torch's samplers, from ``first`` on.

    It draws the same numbers as torch's iterator, in a third of the time. None: the sampler is of another kind.
    """
    if type(index_sampler) is not BatchSampler or type(index_sampler.sampler) not in _KNOWN:
        return None
    size, sampler = index_sampler.batch_size, index_sampler.sampler
    if type(sampler) is SequentialSampler:
        items: Iterator[Any] = iter(range(first * size, len(sampler.data_source)))
    else:
        items = skipping(_order_of(sampler), first * size)
    if index_sampler.drop_last:
        return map(list, zip(*[items] * size, strict=False))
    return takewhile(bool, map(list, map(islice, repeat(items), repeat(size))))


def _order_of(sampler: Any) -> Iterator[Any]:
    """Return the indices of ``iter(sampler)``. A permutation stays a tensor, and is converted to Python numbers by
    `CHUNK` indices at a time. A list of all indices would take four times the memory and delay the first index."""
    if type(sampler) is RandomSampler and not sampler.replacement:
        return _shuffled(sampler)
    if type(sampler) is SubsetRandomSampler:
        return _subset(sampler)
    if type(sampler) is DistributedSampler and sampler.shuffle and sampler.num_samples and _knows_its_length(sampler):
        return _in_chunks(_share_of_rank(sampler))
    return iter(sampler)


def _in_chunks(order: torch.Tensor) -> Iterator[int]:
    return chain.from_iterable(chunk.tolist() for chunk in order.split(CHUNK))


def _permutation(length: int, generator: torch.Generator | None) -> torch.Tensor:
    """Return the permutation of ``torch.randperm``, in half the memory if the numbers fit into 32 bits."""
    is_small = length <= torch.iinfo(torch.int32).max
    return torch.randperm(length, generator=generator, dtype=torch.int32 if is_small else torch.int64)


def _shuffled(sampler: RandomSampler) -> Iterator[int]:
    """Yield the indices of a `RandomSampler`. As in torch, a last permutation is drawn even if no index is missing."""
    length, generator = len(sampler.data_source), sampler.generator
    if generator is None:
        generator = torch.Generator()
        generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))
    for _ in range(sampler.num_samples // length):
        yield from _in_chunks(_permutation(length, generator))
    yield from _in_chunks(_permutation(length, generator)[: sampler.num_samples % length])


def _subset(sampler: SubsetRandomSampler) -> Iterator[Any]:
    for at in _in_chunks(_permutation(len(sampler.indices), sampler.generator)):
        yield sampler.indices[at]


def _knows_its_length(sampler: DistributedSampler[Any]) -> bool:
    """Return False if the dataset has had another length since the sampler was made, for which torch has an error."""
    length: int = len(sampler.dataset)  # type: ignore[arg-type]
    return length >= sampler.total_size if sampler.drop_last else length <= sampler.total_size


def _share_of_rank(sampler: DistributedSampler[Any]) -> torch.Tensor:
    """Return the indices of this rank from the shuffled order, which is the same on all ranks."""
    generator = torch.Generator()
    generator.manual_seed(sampler.seed + sampler.epoch)
    order = _permutation(len(sampler.dataset), generator)  # type: ignore[arg-type]
    if (missing := sampler.total_size - len(order)) > 0:
        order = torch.cat([order, order.repeat(math.ceil(missing / len(order)))[:missing]])
    return order[sampler.rank : sampler.total_size : sampler.num_replicas]


def indices_from(first: int, index_sampler: Any) -> Iterator[Any]:
    """Return the indices of batches from ``first`` on, drawn from the present random states."""
    return batches_of(index_sampler, first) or skipping(iter(index_sampler), first)


def skipping(items: Iterator[Any], count: int) -> Iterator[Any]:
    """Return ``items`` without the first ``count`` of them."""
    deque(islice(each_of(items), count), maxlen=0)
    return items


def each_of(iterator: Iterator[Any]) -> Iterator[Any]:
    """Return the items of ``iterator``. Its ``__iter__`` is not called: it may restart the iterator, as Lightning's."""
    return map(next, repeat(iterator))
