"""The state of a pass, from which the iterator of a later run resumes.

The random states before the first draw of the samplers and the number of delivered batches describe a pass (see
`dpex.engine.samplers`). A run that resumes skips the delivered batches without reading any data.

Recording takes no time per batch: random states are noted before the first draw, and the rest is read when a state is
requested. The exception is a sampler with a ``state_dict()``, which is called every `PassRecorder.every` batches.

When a torch iterator is made, it draws a base seed and calls ``iter()`` on its sampler; without workers, also on a
stream. An iterator that resumes a pass takes the earlier run's base seed, and undoes torch's draw from the generator.
"""

from __future__ import annotations

import contextlib
import copy
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from dpex._torch import DatasetKind, SingleProcessDataLoaderIter
from dpex.engine.draws import BegunDraws, Draws
from dpex.engine.samplers import SamplerStart, batches_of, indices_from, samplers_within, skipping
from dpex.schedule.progress import ResumePoint
from dpex.system.user_warnings import warn
from dpex.worker.states import DatasetState, is_stateful, load_state, state_of

if TYPE_CHECKING:
    from dpex.engine.engine import Engine

SAMPLER_EVERY = 32
"""Batches between calls of a sampler's ``state_dict()``. A later run redraws the indices of at most as many batches."""

PASSED_OVER = (
    "neither the {kind} nor its iterator has a state_dict() without arguments and a load_state_dict(state): resuming "
    "must reload and discard {batches} batches. Implement both methods to resume at once"
)
_MOST_STATES = 1024
"""Maximum number of sampler states that are kept. Fewer are recorded between the latest delivery and latest draw."""


# -- the state of a pass -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PassState:
    base_seed: int
    """The base seed of the iterator."""
    start: SamplerStart
    """Random states before the first draw. Once the pass has finished, the present random states, from which the next
    pass starts."""
    point: ResumePoint
    """The next batch, and the states of logical workers."""
    batches: int
    """Batches delivered so far."""
    sampler: tuple[int, Any] | None = None
    """A number of drawn batches, and the state of the stateful sampler after these draws."""
    dataset: DatasetState | None = None
    """The state of a dataset that is read in the training process."""
    fetcher: Any = None
    """The fetcher of a dataset that is read in the training process. The state of the dataset is read from it later."""
    has_finished: bool = False
    """True if the loop over the pass has ended."""
    persists: bool = False
    """True if the next epoch belongs to the same iterator."""


class PassRecorder:
    """Records, during an iterator's passes, the parts of a `PassState` that cannot be determined afterwards.

    Attributes:
        every: Batches after which a sampler is asked for its state.
        failed: Count of batches that raised an error, which torch's iterator does not count.
        has_finished: As in `PassState`.
    """

    def __init__(self, loader: Any, base_seed: int) -> None:
        self._index_sampler = loader._index_sampler
        self._generator = loader.generator
        self._is_stream = loader._dataset_kind == DatasetKind.Iterable
        self._base_seed = base_seed
        self._persists = bool(loader.persistent_workers and loader.num_workers)
        self._stateful = next((s for _, s in samplers_within(self._index_sampler) if is_stateful(s)), None)
        self._draws: Draws | None = None
        self._states: deque[tuple[int, Any]] = deque(maxlen=_MOST_STATES)
        self.every = loader.worker_config.snapshot_every_n_steps or SAMPLER_EVERY
        self.failed: int = 0
        self.has_finished: bool = False

    def begin(
        self,
        source: Iterator[Any],
        resume: PassState | None = None,
        begun: BegunDraws | None = None,
        *,
        copies: bool = False,
    ) -> Draws:
        """Return the indices of a pass that starts anew, resumes from ``resume``, or continues from ``begun``."""
        self.failed, self.has_finished = 0, False
        self._states.clear()
        self._draws = draws = Draws(
            self._index_sampler,
            self._generator,
            source,
            copies=copies,
            is_stream=self._is_stream,
            stateful=self._stateful,
            every=self.every,
            note=self._states.append,
        )
        if begun is not None:
            draws.begin_at(0, begun)
        elif resume is not None and not resume.has_finished:
            start, first = resume.start, resume.point.first
            start.apply_generators(self._index_sampler, self._generator)
            start.apply_epochs(self._index_sampler)
            with start.global_states():
                draws.begin_at(first, BegunDraws.of(start, self._rest(resume)))
        return draws

    def _rest(self, resume: PassState) -> Iterator[Any]:
        first = resume.point.first
        if resume.sampler is None or self._stateful is None:
            return indices_from(0 if self._is_stream else first, self._index_sampler)
        at, state = resume.sampler
        self._stateful.load_state_dict(copy.deepcopy(state))
        self._states.append(resume.sampler)
        return skipping(iter(self._index_sampler), first - at)

    def _now(self) -> SamplerStart:
        return SamplerStart.now(
            self._index_sampler, self._generator, is_stream=self._is_stream, for_iterator=self.has_finished
        )

    def raised(self, error: Exception, *, has_index: bool) -> None:
        """Note that ``next()`` raised ``error``, which ends the pass or takes the place of a batch.

        ``has_index``: True if a batch's index was drawn. A StopIteration of a map-style dataset is a failed batch.
        """
        is_end = isinstance(error, StopIteration)
        self.has_finished = self.has_finished or is_end
        if has_index and not (is_end and self._is_stream):
            self.failed += 1

    def state(self, point: ResumePoint, batches: int, *, fetcher: Any = None) -> PassState:
        known = [found for found in list(self._states) if found[0] <= point.first]
        start = None if self.has_finished or self._draws is None else self._draws.start
        return PassState(
            base_seed=self._base_seed,
            start=self._now() if start is None else start,
            point=point,
            batches=batches,
            sampler=known[-1] if known and point.first else None,
            fetcher=fetcher,
            has_finished=self.has_finished,
            persists=self._persists,
        )


# -- iterators that go on ----------------------------------------------------------------------------------------------


def begin_pass(init: Callable[[Any], None], iterator: Any, loader: Any, resume: PassState | None) -> None:
    """Call torch's ``__init__`` of an iterator. An iterator that resumes a pass gets the base seed of the earlier run.

    If the earlier run had finished its pass, the next pass draws the numbers that it would have drawn in that run. If
    the present random states differ, the first index of that pass is drawn at once and kept in ``_begun``.
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
    start.apply_generators(loader._index_sampler, loader.generator)
    is_now = start.is_now
    with start.global_states():
        if resume.persists:
            _init_with_seed(init, iterator, loader, resume)
        else:
            init(loader)
        if not is_now and loader._dataset_kind != DatasetKind.Iterable:
            sampler = loader._index_sampler
            begun_at = SamplerStart.now(sampler, loader.generator)
            iterator._begun = BegunDraws.of(begun_at, batches_of(sampler) or iterator._sampler_iter)


def _init_with_seed(init: Callable[[Any], None], iterator: Any, loader: Any, resume: PassState) -> None:
    """Use the base seed of the earlier run. The generator from which torch draws a base seed stays unchanged."""
    source = torch.default_generator if loader.generator is None else loader.generator
    before = source.get_state()
    try:
        init(loader)
    finally:
        source.set_state(before)
    iterator._base_seed = resume.base_seed


def point_for(resume: PassState | None) -> ResumePoint | None:
    """Return the position from which a pass resumes, or None if it starts anew."""
    if resume is None or not resume.has_finished:
        return None if resume is None else resume.point
    return resume.point.next_epoch() if resume.persists else None


def worker_state(engine: Engine, recorder: PassRecorder) -> PassState | None:
    """Return the state of a pass that an engine drives. None: the position is unknown (see `Engine.point`)."""
    point = engine.point()
    return None if point is None else recorder.state(point, point.first)


# -- without workers ---------------------------------------------------------------------------------------------------


def in_process_state(iterator: Any) -> PassState | None:
    if iterator is None:
        return None
    recorder: PassRecorder = iterator._recorder
    batches = iterator._num_yielded + recorder.failed
    is_told = is_stateful(iterator._dataset) or is_stateful(stream_of(iterator))
    fetcher = iterator._dataset_fetcher if is_told else None
    return recorder.state(_reached(iterator._first, batches), batches, fetcher=fetcher)


def _reached(begun: ResumePoint, batches: int) -> ResumePoint:
    """Return the point of a pass that began at ``begun``, after ``batches`` delivered batches of the epoch."""
    first = begun.first
    for _ in range(batches - begun.first):
        while first in begun.ahead:
            first += 1
        first += 1
    return ResumePoint(epoch=begun.epoch, first=first, ahead=frozenset(n for n in begun.ahead if n >= first))


def stream_of(iterator: Any) -> Any:
    """Return the iterator of an iterable dataset that is read in this process, else None."""
    return getattr(iterator._dataset_fetcher, "dataset_iter", None)


def dataset_state_of(fetcher: Any) -> DatasetState:
    stream = getattr(fetcher, "dataset_iter", None)
    return DatasetState(
        dataset=None if stream is fetcher.dataset else state_of(fetcher.dataset),
        iterator=state_of(stream),
        has_ended=bool(getattr(fetcher, "ended", False)),
    )


def go_on_in_process(iterator: SingleProcessDataLoaderIter, resume: PassState) -> None:
    """Restore the position of a stream, and the count of delivered batches."""
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
        for _ in range(resume.batches):
            with contextlib.suppress(Exception):  # the batch raised it in the earlier run, too
                inner._dataset_fetcher.fetch(inner._next_index())
