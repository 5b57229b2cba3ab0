"""The next epoch, predicted, so that its first batches are made while the last ones of this epoch are handed out.

When a sampler has ended, the loader's next ``iter()`` is carried out in advance: with the random states of that moment,
the order is drawn as ``iter()`` would draw it. Then all states are put back, so that nothing else notices. The next
``iter()`` compares the states with those that were expected. If they are the same, it continues with the iterator of
the prediction. Otherwise the prediction is dropped, and the epoch begins as ever.

Only torch's own samplers are predicted, as they have no other effects. Two habits of a training are learned from the
epoch before. One is the step of `DistributedSampler.set_epoch`. The other is the number of seeds that other loaders,
such as that of a validation, draw from torch's global generator.

The thread that iterates owns a prediction.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch.utils.data import DistributedSampler

from dpex.engine.draws import BegunDraws
from dpex.engine.samplers import DRAWING, TORCHS, SamplerStart, generators_of, samplers_within
from dpex.system.interrupts import is_interrupt, taken

MISSES = 4
"""Epochs in a row that begin in another way than predicted before it is given up: some are needed to learn from."""
_MISSED = (
    f"{MISSES} epochs in a row began in another way than predicted: random numbers are drawn between epochs, or the "
    "loader, its dataset or its sampler is changed"
)
_SEEDS_BETWEEN = 8
"""The most seeds of other loaders between two epochs that are recognised."""


@dataclass(kw_only=True)
class OverlapRecord:
    """Habits of a training, learned from the predictions of an iterator.

    Attributes:
        seeds_between: Seeds that others draw from torch's global generator before the next epoch.
        epoch_step: By how much the number of `DistributedSampler.set_epoch` grows.
        why_not: The reason why nothing is predicted, or "".
        misses: How many predictions in a row were wrong.
    """

    seeds_between: int = 0
    epoch_step: int = 1
    why_not: str = ""
    misses: int = 0


def why_unpredictable(index_sampler: Any) -> str:
    """Return why the order that a sampler will draw cannot be predicted, or ""."""
    for _, sampler in samplers_within(index_sampler):
        if type(sampler) not in TORCHS:
            return f"drawing the order of {type(sampler).__name__} in advance might have other effects"
    try:
        _order(index_sampler)
    except Exception as error:
        if is_interrupt(error):
            raise
        return f"a change of the sampler would not be noticed: {error!r}"
    return ""


@dataclass(kw_only=True)
class _Prediction:
    """States of generators and samplers when it was made, those expected at the next ``iter()``, and after it."""

    generators: list[torch.Generator]
    then: list[torch.Tensor]
    expected: list[torch.Tensor]
    after: list[torch.Tensor]
    epochs_then: list[int]
    epochs: list[int]
    order: list[Any]
    indices: Iterator[Any]
    drawn: deque[Any]


class NextEpoch:
    """The prediction of one iterator.

    Args:
        index_sampler: Draws the index of each batch.
        generator: The loader's own.
        record: Learns from its predictions.
    """

    def __init__(self, index_sampler: Any, generator: Any, record: OverlapRecord) -> None:
        self._index_sampler = index_sampler
        self._generator = generator
        self.record = record
        self._prediction: _Prediction | None = None
        self._has_tried = False

    def begin(self) -> bool:
        """Predict the next epoch. Return False if that was tried in this epoch already, or is given up."""
        if self._has_tried or self.record.misses >= MISSES:
            return False
        self._has_tried = True
        generators, samplers = self._sources(), self._told()
        then = [each.get_state() for each in generators]
        epochs = [sampler.epoch for sampler in samplers]
        prediction = _Prediction(
            generators=generators,
            then=then,
            expected=then,
            after=then,
            epochs_then=epochs,
            epochs=[epoch + self.record.epoch_step for epoch in epochs],
            order=_order(self._index_sampler),
            indices=iter(()),
            drawn=deque(),
        )
        self._advanced(prediction, partial(self._begin, prediction))
        self._prediction = prediction
        return True

    def _begin(self, prediction: _Prediction) -> None:
        if torch.default_generator in prediction.generators:
            _draw_seeds(torch.default_generator, self.record.seeds_between)
        prediction.expected = [each.get_state() for each in prediction.generators]
        prediction.indices = iter(self._index_sampler)

    def draw(self, count: int) -> deque[Any]:
        """Draw indices until ``count`` wait to become tickets, or all that are left. Return those, to be emptied."""
        prediction = self._prediction
        assert prediction is not None
        drawn = prediction.drawn
        if len(drawn) < count:
            self._advanced(prediction, lambda: drawn.extend(taken(prediction.indices, count - len(drawn))))
        return drawn

    def forget(self) -> None:
        """Drop the prediction. There is no other one before the next epoch."""
        self._prediction = None

    def is_right(self) -> bool:
        """Return True if ``iter()``, which is about to begin an epoch, will draw what was predicted.

        Otherwise the prediction is dropped.
        """
        prediction, self._has_tried = self._prediction, False
        if prediction is None:
            return False
        if self._is_as_expected(prediction):
            self.record.misses = 0
            return True
        self._prediction = None
        self.record.misses += 1
        if self.record.misses >= MISSES:
            self.record.why_not = _MISSED
        return False

    def _is_as_expected(self, prediction: _Prediction) -> bool:
        try:
            self._learn(prediction)
            return (
                list(map(id, prediction.generators)) == list(map(id, self._sources()))
                and _are_equal([each.get_state() for each in prediction.generators], prediction.expected)
                and prediction.epochs == [sampler.epoch for sampler in self._told()]
                and _are_equal(_order(self._index_sampler), prediction.order)
            )
        except Exception as error:  # of what the sampler has now: it comes again if drawing needs it
            if is_interrupt(error):
                raise
            return False

    def take(self) -> BegunDraws:
        """Return the states before the first draw, and the rest of the indices.

        All generators have the states then that they would have if these indices had been drawn now.
        """
        prediction, self._prediction = self._prediction, None
        assert prediction is not None
        start = SamplerStart.now(self._index_sampler, self._generator)
        for generator, state in zip(prediction.generators, prediction.after, strict=True):
            generator.set_state(state)
        return BegunDraws(start, list(prediction.drawn), prediction.indices)

    def _sources(self) -> list[torch.Generator]:
        """Return the generators from which the next ``iter()`` draws, each once."""
        found = list(generators_of(self._index_sampler, self._generator).values())
        samplers = [sampler for _, sampler in samplers_within(self._index_sampler)]
        draws_global = any(type(sampler) in DRAWING and sampler.generator is None for sampler in samplers)
        if draws_global and all(each is not torch.default_generator for each in found):
            found.append(torch.default_generator)
        return found

    def _told(self) -> list[Any]:
        """Return the samplers with ``set_epoch``."""
        return [one for _, one in samplers_within(self._index_sampler) if type(one) is DistributedSampler]

    def _advanced(self, prediction: _Prediction, act: Callable[[], None]) -> None:
        """Call ``act`` with all states as they are after the prediction's draws so far, then put them back.

        That is one call into C, so that no signal handler leaves a part of them (see `dpex.system.interrupts`).
        """
        generators, samplers = prediction.generators, self._told()
        states, epochs = [each.get_state() for each in generators], [sampler.epoch for sampler in samplers]
        back = chain(
            map(torch.Generator.set_state, generators, states), map(setattr, samplers, repeat("epoch"), epochs)
        )
        try:
            for generator, state in zip(generators, prediction.after, strict=True):
                generator.set_state(state)
            for sampler, epoch in zip(samplers, prediction.epochs, strict=True):
                sampler.set_epoch(epoch)
            act()
            prediction.after = [each.get_state() for each in generators]
        finally:
            deque(back, maxlen=0)

    def _learn(self, prediction: _Prediction) -> None:
        """Learn from what has really changed since the prediction was made."""
        for before, now in zip(prediction.epochs_then, [sampler.epoch for sampler in self._told()], strict=False):
            self.record.epoch_step = now - before
        for generator, state in zip(prediction.generators, prediction.then, strict=True):
            if generator is torch.default_generator:
                seeds = _seeds_between(state, generator.get_state())
                self.record.seeds_between = self.record.seeds_between if seeds is None else seeds


def _draw_seeds(generator: torch.Generator, count: int) -> None:
    """Draw seeds as torch's loaders and samplers do."""
    for _ in range(count):
        torch.empty((), dtype=torch.int64).random_(generator=generator)


def _seeds_between(before: torch.Tensor, now: torch.Tensor) -> int | None:
    """Return the number of seeds that were drawn between two states; None if it was anything else."""
    generator = torch.Generator()
    generator.set_state(before)
    for count in range(_SEEDS_BETWEEN + 1):
        if torch.equal(generator.get_state(), now):
            return count
        _draw_seeds(generator, 1)
    return None


def _order(index_sampler: Any) -> list[Any]:
    """Return all that the order depends on, besides generators and the number of the epoch, as values of their own."""
    found: list[Any] = []
    for _, sampler in samplers_within(index_sampler):
        options = {name: value for name, value in vars(sampler).items() if isinstance(value, (bool, int, float))}
        options.pop("epoch", None)
        found += [id(sampler), options]
        for name in ("data_source", "dataset"):
            source = getattr(sampler, name, None)
            if source is not None:
                found.append(len(source))
        for name in ("indices", "weights"):
            values = getattr(sampler, name, None)
            if values is not None:
                found.append(values.clone() if isinstance(values, torch.Tensor) else pickle.dumps(values))
    return found


def _are_equal(one: list[Any], other: list[Any]) -> bool:
    """Return True if lists of values, some of them tensors, are equal."""
    if len(one) != len(other):
        return False
    for left, right in zip(one, other, strict=True):
        if isinstance(left, torch.Tensor) or isinstance(right, torch.Tensor):
            if type(left) is not type(right) or not torch.equal(left, right):
                return False
        elif left != right:
            return False
    return True
