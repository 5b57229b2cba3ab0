"""The state of a pass, from which the iterator of a later run resumes.

torch's samplers draw their order at once, from a generator of their own or from torch's global one. So the states
before the first draw and the number of delivered batches describe a pass. A run that resumes skips the delivered
batches without reading any data.

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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

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

from dpex._torch import DatasetKind, SingleProcessDataLoaderIter
from dpex.errors import CapturedGraphError
from dpex.schedule.names import attribute
from dpex.schedule.progress import ResumePoint
from dpex.system.interrupts import is_interrupt, taken
from dpex.system.user_warnings import is_first, warn
from dpex.worker.states import GLOBAL, DatasetState, global_states, is_stateful, load_state, set_global_states, state_of

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

DRAWING = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
"""torch's samplers that draw from torch's global generator if they have none of their own."""
TORCHS = (BatchSampler, SequentialSampler, DistributedSampler, *DRAWING)
"""Samplers that torch brings along."""
_KNOWN = (*TORCHS, list, tuple, range, np.ndarray)
_TORCH = ("torch",)
_DEEPEST = 5
"""The most samplers within each other that are looked at."""


# -- samplers ----------------------------------------------------------------------------------------------------------


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


def draws_ahead_safely(sampler: Any) -> bool:
    """Return True for samplers of torch's that draw their order at once, so that drawing ahead is not noticed.

    A `RandomSampler` draws from its generator again when it ends, which the owner of that generator could notice.
    """
    if type(sampler) is BatchSampler:
        sampler = sampler.sampler
    if type(sampler) is RandomSampler:
        return not sampler.replacement and sampler.generator is None
    return type(sampler) in (SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, DistributedSampler)


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
        is_known = all(type(sampler) in _KNOWN for sampler in samplers)
        draws = draws or any(type(sampler) in DRAWING and sampler.generator is None for sampler in samplers)
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

    @contextlib.contextmanager
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


class Begun:
    """The iterator of a sampler of which the items in ``drawn`` were drawn already: they come first."""

    def __init__(self, drawn: deque[Any], sampler: Iterator[Any]) -> None:
        self._drawn = drawn
        self._sampler = sampler

    def __iter__(self) -> Begun:
        return self

    def __next__(self) -> Any:
        if not self._drawn:
            return next(self._sampler)
        item = self._drawn[0]
        del self._drawn[0]  # without a call until it is returned: see `dpex.system.interrupts`
        return item


def begun(sampler: Iterator[Any]) -> Iterator[Any]:
    """Draw the first item of ``sampler``. Return an iterator over that item and the rest."""
    return Begun(deque(taken(sampler, 1)), sampler)


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


@contextlib.contextmanager
def undrawn(generator: torch.Generator | None) -> Iterator[None]:
    """Put a loader's generator, or torch's global one, back after a ``with`` block."""
    source = torch.default_generator if generator is None else generator
    before = source.get_state()
    try:
        yield
    finally:
        source.set_state(before)


# -- the state of a pass -----------------------------------------------------------------------------------------------


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
    """Records what the states of an iterator's passes need and what could not be found out later.

    Args:
        loader: The loader.
        base_seed: The base seed of the iterator.

    Attributes:
        every: After how many batches a sampler is asked for its state.
        failed: Batches that raised an error, where torch's iterator counts those that it returned.
        has_finished: As in `PassState`.
    """

    def __init__(self, loader: Any, base_seed: int) -> None:
        self._index_sampler = loader._index_sampler
        self._generator = loader.generator
        self._is_stream = loader._dataset_kind == DatasetKind.Iterable
        self._base_seed = base_seed
        self._persists = bool(loader.persistent_workers and loader.num_workers)
        self._stateful = next((s for _, s in samplers_within(self._index_sampler) if is_stateful(s)), None)
        self._start: SamplerStart | None = None
        self._states: deque[tuple[int, Any]] = deque(maxlen=_MOST_STATES)
        self.every = loader.worker_config.snapshot_every_n_steps or SAMPLER_EVERY
        self.failed = 0
        self.has_finished = False

    def begin(self, indices: Iterator[Any], resume: PassState | None = None, drawn: Drawn = None) -> Iterator[Any]:
        """Return the indices of a pass that begins, or is resumed: those that were ``drawn`` already come first."""
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
            base_seed=self._base_seed,
            start=self._now() if start is None else start,
            point=point,
            batches=batches,
            sampler=known[-1] if known and point.first else None,
            fetcher=fetcher,
            has_finished=self.has_finished,
            persists=self._persists,
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


def point_for(resume: PassState | None) -> ResumePoint | None:
    """Return where a pass with workers goes on; None: it begins anew, as the pass of another iterator."""
    if resume is None or not resume.has_finished:
        return None if resume is None else resume.point
    return resume.next_epoch() if resume.persists else None


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
    for _ in range(batches - begun.first):
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
