"""What is kept of a pass for whoever asks for its state, and how a later run goes on with it.

Nothing here costs anything per batch: random states are noted before the first index is drawn, and all else is read
when it is asked for. Only a sampler that tells its own state is asked for it while it is drawn from, now and then.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from dpex.core.resume_point import ResumePoint
from dpex.engine.sampler_start import FirstDraw, SamplerStart, passed_over, rest_of, samplers_within
from dpex.errors import CapturedGraphError
from dpex.system.interrupts import is_interrupt, taken
from dpex.system.user_warnings import is_first, warn
from dpex.worker.logical_state import DatasetState
from dpex.worker.stateful import is_stateful

SAMPLER_EVERY = 32
"""A sampler is asked for its state after so many batches; as many indices at most are drawn again by a later run."""

_CANNOT_TELL = "state_dict() of the sampler failed, so its state is not kept: a later run draws its order again"
_MOST_STATES = 1024
"""States of a sampler that are kept; more than lie between what is drawn and what is delivered."""


@dataclass(frozen=True, kw_only=True)
class PassState:
    """See the module.

    base_seed: of the iterator. start: random states before the first draw; once it ``has_finished``, which is when the
    end was told, those of the loader's own generators now. point: where it stands. batches: delivered so far. sampler:
    the state of a stateful sampler, and after how many batches. dataset: of a dataset that is read in the training
    process; fetcher: what reads it, and can tell that later. persists: the next epoch is the same iterator's.
    """

    base_seed: int
    start: SamplerStart
    point: ResumePoint
    batches: int
    sampler: tuple[int, Any] | None = None
    dataset: DatasetState | None = None
    fetcher: Any = None
    has_finished: bool = False
    persists: bool = False

    def next_epoch(self) -> ResumePoint:
        """Where the next epoch of the same iterator begins."""
        logicals = tuple(replace(logical, batches=0, has_ended=False) for logical in self.point.logicals)
        return ResumePoint(epoch=self.point.epoch + 1, logicals=logicals, streams=self.point.streams)


class PassRecorder:
    """Notes of a pass what could not be known later.

    Args:
        index_sampler: Draws the index of each batch.
        generator: The loader's own.
        is_stream: The dataset is iterable, and indices say nothing.
        every: After how many batches a sampler is asked for its state; None: `SAMPLER_EVERY`.

    ``base_seed``, ``persists``: as in `PassState`. ``failed``: batches that raised an error, where torch's iterator
    counts those that it returned.
    """

    def __init__(self, index_sampler: Any, generator: Any, *, is_stream: bool, every: int | None) -> None:
        self._index_sampler = index_sampler
        self._generator = generator
        self._is_stream = is_stream
        self._every = every or SAMPLER_EVERY
        self._stateful = next((s for _, s in samplers_within(index_sampler) if is_stateful(s)), None)
        self._start: SamplerStart | None = None
        self._states: deque[tuple[int, Any]] = deque(maxlen=_MOST_STATES)
        self.base_seed = 0
        self.persists = False
        self.failed = 0
        self.has_finished = False

    def begin(
        self,
        indices: Iterator[Any],
        resume: PassState | None = None,
        drawn: tuple[SamplerStart, Iterator[Any]] | None = None,
    ) -> Iterator[Any]:
        """The indices of a pass that begins, or goes on: ``indices``, or those from there on.

        drawn: indices of which the first was drawn already, and the states before that.
        """
        self._start, self.failed, self.has_finished = None, 0, False
        self._states.clear()
        if drawn is not None:
            self._start, begun = drawn
            return self._recorded(begun, 0)
        if resume is None or resume.has_finished:
            return FirstDraw(self._recorded(indices, 0), self._note)
        self._start = resume.start
        resume.start.apply_own(self._index_sampler, self._generator)
        if self._is_stream:
            return indices
        with resume.start.global_states():
            return self._recorded(self._rest(resume), resume.point.first)

    def _rest(self, resume: PassState) -> Iterator[Any]:
        first = resume.point.first
        if resume.sampler is None or self._stateful is None:
            return rest_of(self._index_sampler, first)
        at, state = resume.sampler
        self._stateful.load_state_dict(copy.deepcopy(state))
        self._states.append(resume.sampler)
        return passed_over(iter(self._index_sampler), first - at)

    def _recorded(self, indices: Iterator[Any], first: int) -> Iterator[Any]:
        if self._stateful is None:
            return indices
        return _StatefulIndices(indices, self._stateful, first, self._every, self._states)

    def _note(self) -> None:
        self._start = self._now()

    def _now(self) -> SamplerStart:
        return SamplerStart.now(
            self._index_sampler, self._generator, is_stream=self._is_stream, for_iterator=self.has_finished
        )

    def raised(self, error: Exception) -> None:
        """Note that ``next()`` raised ``error``: the end, or in place of a batch. A refusal has drawn nothing."""
        if isinstance(error, StopIteration):
            self.has_finished = True
        elif not isinstance(error, CapturedGraphError):
            self.failed += 1

    def state(self, point: ResumePoint, batches: int, *, fetcher: Any = None) -> PassState:
        """What is known of the pass that stands there."""
        known = [found for found in list(self._states) if found[0] <= point.first]
        start = None if self.has_finished else self._start
        return PassState(
            base_seed=self.base_seed,
            start=self._now() if start is None else start,
            point=point,
            batches=batches,
            sampler=self._at(point.first, known[-1]) if known and point.first else None,
            fetcher=fetcher,
            has_finished=self.has_finished,
            persists=self.persists,
        )

    def _at(self, first: int, known: tuple[int, Any]) -> tuple[int, Any]:
        """The state of the sampler there: the one that is known, unless the sampler can tell what follows from it."""
        at, state = known
        size = getattr(self._index_sampler, "batch_size", 1)
        follow = getattr(self._stateful, "state_after", None)
        return known if follow is None or size is None else (first, follow(state, (first - at) * size))


class _StatefulIndices:
    """Indices of a sampler that tells its state, which is asked for it after the first batch and then now and then.

    Before the first batch a sampler may still tell of the epoch before.
    """

    def __init__(
        self, indices: Iterator[Any], sampler: Any, first: int, every: int, states: deque[tuple[int, Any]]
    ) -> None:
        self._sampler = indices
        self._held: list[Any] = []
        self._asked = sampler
        self._drawn = first
        self._due: float = first + 1
        self._every = every
        self._states = states

    def __iter__(self) -> _StatefulIndices:
        return self

    def __next__(self) -> Any:
        held = self._held
        if not held:
            held.extend(taken(self._sampler, 1))
            self._drawn += len(held)
        if not held:
            raise StopIteration
        if self._drawn >= self._due:
            self._due = self._drawn + self._every
            self._ask()
        index = held[0]
        del held[0]  # without a call until it is returned: see `dpex.system.interrupts`
        return index

    def _ask(self) -> None:
        try:
            state = copy.deepcopy(self._asked.state_dict())
        except Exception as error:
            if is_interrupt(error):
                raise
            self._due = math.inf
            if is_first(_CANNOT_TELL):
                warn(f"{_CANNOT_TELL}: {error!r}")
            return
        self._states.append((self._drawn, state))
