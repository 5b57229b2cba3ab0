"""The state of a pass, from which the iterator of a later run resumes.

Nothing here has a cost per batch: random states are noted before the first index is drawn, and the rest is read when
the state is asked for. Only a sampler that has a state of its own is asked for it now and then during the pass.

An iterator of torch's draws a base seed when it is made, and iterates its dataset and its sampler. An iterator that
resumes a pass has the base seed of the other run, and leaves all generators as they were before.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpex._torch import BaseDataLoaderIter, DatasetKind, SingleProcessDataLoaderIter
from dpex.engine.sampler_start import FirstDraw, SamplerStart, begun, passed_over, rest_of, samplers_within, undrawn
from dpex.errors import CapturedGraphError
from dpex.schedule.progress import ResumePoint
from dpex.system.interrupts import is_interrupt, taken
from dpex.system.user_warnings import is_first, warn
from dpex.worker.states import DatasetState, is_stateful, load_state, state_of

if TYPE_CHECKING:
    from dpex.engine.engine import Engine

SAMPLER_EVERY = 32
"""Batches after which a sampler is asked for its state; a later run draws at most as many indices again."""

PASSED_OVER = (
    "neither the {kind} nor its iterator has a state_dict() without arguments and a load_state_dict(state): the "
    "{batches} batches that were delivered are made again and thrown away. Give it both to go on at once"
)
_CANNOT_TELL = "state_dict() of the sampler failed, so its state is not kept: a later run draws its order again"
_MOST_STATES = 1024
"""States of a sampler that are kept: more than there are between the latest draw and the latest delivery."""

Drawn = tuple[SamplerStart, Iterator[Any]] | None
"""Indices of which the first was drawn already, and the states before that."""


@dataclass(frozen=True, kw_only=True)
class PassState:
    """The state of a pass."""

    base_seed: int
    """The base seed of the iterator."""
    start: SamplerStart
    """Random states before the first draw, or, once the pass has finished, those of the loader's own generators now."""
    point: ResumePoint
    """The next batch, and the states of logical workers."""
    batches: int
    """Batches delivered so far."""
    sampler: tuple[int, Any] | None = None
    """The number of batches after which a stateful sampler was asked, and its state."""
    dataset: DatasetState | None = None
    """The state of a dataset that is read in the training process."""
    fetcher: Any = None
    """The fetcher of that dataset, from which its state is read later."""
    has_finished: bool = False
    """The loop over the pass has ended."""
    persists: bool = False
    """The next epoch belongs to the same iterator."""

    def next_epoch(self) -> ResumePoint:
        """Return where the next epoch of the same iterator begins."""
        logicals = tuple(replace(logical, batches=0, has_ended=False) for logical in self.point.logicals)
        return ResumePoint(epoch=self.point.epoch + 1, logicals=logicals, streams=self.point.streams)


class PassRecorder:
    """Records what a state needs and what could not be found out later.

    Args:
        index_sampler: Draws the index of each batch.
        generator: The loader's own.
        is_stream: The dataset is iterable, and indices say nothing.
        every: After how many batches a sampler is asked for its state; None: `SAMPLER_EVERY`.

    ``base_seed``, ``persists``: as in `PassState`. ``failed``: batches that raised an error, where torch's iterator
    counts those that it returned. ``every``: as above.
    """

    def __init__(self, index_sampler: Any, generator: Any, *, is_stream: bool, every: int | None) -> None:
        self._index_sampler = index_sampler
        self._generator = generator
        self._is_stream = is_stream
        self.every = every or SAMPLER_EVERY
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
        return _StatefulIndices(indices, self._stateful, first, self)

    def _note(self) -> None:
        self._start = self._now()

    def note_sampler(self, drawn: int, state: Any) -> None:
        """Keep the state of a stateful sampler after ``drawn`` batches."""
        self._states.append((drawn, state))

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
        """Return the state of the pass that is at ``point``."""
        known = [found for found in list(self._states) if found[0] <= point.first]
        start = None if self.has_finished else self._start
        return PassState(
            base_seed=self.base_seed,
            start=self._now() if start is None else start,
            point=point,
            batches=batches,
            sampler=known[-1] if known and point.first else None,
            fetcher=fetcher,
            has_finished=self.has_finished,
            persists=self.persists,
        )


class _StatefulIndices:
    """Indices of a sampler that tells its state, which is asked for it after the first batch and then now and then.

    Before the first batch a sampler may still tell of the epoch before.
    """

    def __init__(self, indices: Iterator[Any], sampler: Any, first: int, recorder: PassRecorder) -> None:
        self._sampler = indices
        self._held: list[Any] = []
        self._asked = sampler
        self._drawn = first
        self._due: float = first + 1
        self._recorder = recorder

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
            self._due = self._drawn + self._recorder.every
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
        self._recorder.note_sampler(self._drawn, state)


# -- iterators that go on ----------------------------------------------------------------------------------------------


def begin_pass(init: Callable[[Any], None], iterator: Any, loader: Any, resume: PassState | None) -> None:
    """Call torch's ``__init__`` of an iterator. One that goes on gets the base seed of the other run.

    One that begins an epoch draws as the other run would have. The first index may then be drawn already: it is in
    ``_drawn``, with the states before.
    """
    if resume is None:
        init(loader)
        return
    if resume.dataset is not None:
        load_state(loader.dataset, resume.dataset.dataset)
    if not resume.has_finished:
        _init_with_seed(init, iterator, loader, resume)
        return
    start = resume.start
    start.apply_own(loader._index_sampler, loader.generator)
    is_now = start.is_now
    with start.global_states():
        if resume.persists:
            _init_with_seed(init, iterator, loader, resume)
        else:
            init(loader)
        if not is_now and loader._dataset_kind != DatasetKind.Iterable:
            iterator._drawn = SamplerStart.now(loader._index_sampler, loader.generator), begun(iterator._sampler_iter)


def _init_with_seed(init: Callable[[Any], None], iterator: Any, loader: Any, resume: PassState) -> None:
    with undrawn(loader.generator):
        init(loader)
    iterator._base_seed = resume.base_seed


def _is_same_iterators(resume: PassState) -> bool:
    """Return True if the pass is one of the same iterator, as the next epoch is if its workers persisted."""
    return resume.persists or not resume.has_finished


def point_for(resume: PassState | None) -> ResumePoint | None:
    """Return where a pass with workers goes on; None: it begins anew."""
    if resume is None or not _is_same_iterators(resume):
        return None
    return resume.next_epoch() if resume.has_finished else resume.point


def recorder_of(iterator: BaseDataLoaderIter, loader: Any) -> PassRecorder:
    """Return the recorder of the passes of this iterator."""
    recorder = PassRecorder(
        loader._index_sampler,
        loader.generator,
        is_stream=loader._dataset_kind == DatasetKind.Iterable,
        every=loader.worker_config.snapshot_every_n_steps,
    )
    recorder.base_seed = int(iterator._base_seed)
    recorder.persists = bool(loader.persistent_workers and loader.num_workers)
    return recorder


def worker_state(engine: Engine, recorder: PassRecorder) -> PassState | None:
    """Return the state of a pass that an engine drives. None: another thread has been in ``next()`` for too long."""
    point = engine.point()
    return None if point is None else recorder.state(point, point.first)


# -- without workers ---------------------------------------------------------------------------------------------------


def in_process_state(iterator: Any) -> PassState | None:
    """Return the state of a pass of an in-process iterator."""
    if iterator is None:
        return None
    recorder: PassRecorder = iterator._recorder
    batches = iterator._num_yielded + recorder.failed
    is_told = is_stateful(iterator._dataset) or is_stateful(stream_of(iterator))
    fetcher = iterator._dataset_fetcher if is_told else None
    return recorder.state(_reached(iterator._first, batches), batches, fetcher=fetcher)


def _reached(begun: ResumePoint, batches: int) -> ResumePoint:
    """Return where a pass is that began at ``begun``, once ``batches`` batches of the epoch are delivered."""
    first = begun.first
    for _ in range(batches - begun.first - len(begun.ahead)):
        while first in begun.ahead:
            first += 1
        first += 1
    return ResumePoint(epoch=begun.epoch, first=first, ahead=frozenset(n for n in begun.ahead if n >= first))


def stream_of(iterator: Any) -> Any:
    """Return the iterator of an iterable dataset that is read in this process, else None."""
    return getattr(iterator._dataset_fetcher, "dataset_iter", None)


def dataset_state_of(fetcher: Any) -> DatasetState:
    """Return the state of a dataset that is read in the training process."""
    stream = getattr(fetcher, "dataset_iter", None)
    return DatasetState(
        dataset=None if stream is fetcher.dataset else state_of(fetcher.dataset),
        iterator=state_of(stream),
        has_ended=bool(getattr(fetcher, "ended", False)),
    )


def go_on_in_process(iterator: SingleProcessDataLoaderIter, resume: PassState) -> None:
    """Set the dataset, and the count of batches, to where they were."""
    if resume.has_finished:
        return
    inner: Any = iterator
    inner._num_yielded = resume.batches
    stream = stream_of(iterator)
    if stream is None:
        return
    if resume.dataset is not None and (is_stateful(stream) or is_stateful(inner._dataset)):
        load_state(stream, resume.dataset.iterator)
        inner._dataset_fetcher.ended = resume.dataset.has_ended
    elif resume.batches:
        warn(PASSED_OVER.format(kind=type(inner._dataset).__name__, batches=resume.batches))
        with contextlib.suppress(StopIteration):
            for _ in range(resume.batches):
                inner._dataset_fetcher.fetch(next(inner._sampler_iter))
