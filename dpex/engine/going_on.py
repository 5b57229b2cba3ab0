"""How the iterators of a loader go on within a pass that another run began, and how their state is read.

An iterator of torch's draws a base seed when it is made, and iterates its dataset and its sampler. One that goes on
has the base seed of the other run, and leaves all generators as they were before.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from dpex._torch import BaseDataLoaderIter, DatasetKind, SingleProcessDataLoaderIter
from dpex.core.resume_point import ResumePoint
from dpex.engine.pass_state import PassRecorder, PassState
from dpex.engine.sampler_start import Begun, SamplerStart, undrawn
from dpex.system.user_warnings import warn
from dpex.worker.logical_state import DatasetState
from dpex.worker.stateful import is_stateful, load_state, state_of

if TYPE_CHECKING:
    from dpex.engine.engine import Engine

PASSED_OVER = (
    "neither the {kind} nor its iterator has a state_dict() without arguments and a load_state_dict(state): the "
    "{batches} batches that were delivered are made again and thrown away. Give it both to go on at once"
)


Drawn = tuple[SamplerStart, Iterator[Any]] | None


def begin_pass(init: Callable[[Any], None], iterator: Any, loader: Any, resume: PassState | None) -> None:
    """Call torch's ``__init__`` of an iterator; one that goes on gets the base seed of the other run.

    One that begins an epoch draws as the other run would have. The first index, too, may then be drawn already: it is
    in ``_drawn``, with the states before.
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
            iterator._drawn = SamplerStart.now(loader._index_sampler, loader.generator), Begun(iterator._sampler_iter)


def _init_with_seed(init: Callable[[Any], None], iterator: Any, loader: Any, resume: PassState) -> None:
    with undrawn(loader.generator):
        init(loader)
    iterator._base_seed = resume.base_seed


def _is_same_iterators(resume: PassState) -> bool:
    """Whether the pass belongs to the iterator of the other run: the next epoch does if its workers persisted."""
    return resume.persists or not resume.has_finished


def point_for(resume: PassState | None) -> ResumePoint | None:
    """Where a pass with workers goes on; None: it begins anew."""
    if resume is None or not _is_same_iterators(resume):
        return None
    return resume.next_epoch() if resume.has_finished else resume.point


def recorder_of(iterator: BaseDataLoaderIter, loader: Any) -> PassRecorder:
    """What takes notes of the passes of this iterator."""
    recorder = PassRecorder(
        loader._index_sampler,
        loader.generator,
        is_stream=loader._dataset_kind == DatasetKind.Iterable,
        every=loader.snapshot_every_n_steps,
    )
    recorder.base_seed = int(iterator._base_seed)
    recorder.persists = bool(loader.persistent_workers and loader.num_workers)
    return recorder


def worker_state(engine: Engine, recorder: PassRecorder) -> PassState | None:
    """The state of a pass that an engine drives; None: another thread has been in it for too long."""
    point = engine.point()
    return None if point is None else recorder.state(point, point.first)


# -- without workers ---------------------------------------------------------------------------------------------------


def in_process_state(iterator: Any) -> PassState | None:
    """The state of a pass that torch's in-process iterator drives."""
    if iterator is None:
        return None
    recorder: PassRecorder = iterator._recorder
    batches = iterator._num_yielded + recorder.failed
    is_told = is_stateful(iterator._dataset) or is_stateful(stream_of(iterator))
    fetcher = iterator._dataset_fetcher if is_told else None
    return recorder.state(_reached(iterator._first, batches), batches, fetcher=fetcher)


def _reached(begun: ResumePoint, batches: int) -> ResumePoint:
    """Where a pass stands that began at ``begun``, once so many batches of the epoch are delivered."""
    first = begun.first
    for _ in range(batches - begun.first - len(begun.ahead)):
        while first in begun.ahead:
            first += 1
        first += 1
    return ResumePoint(epoch=begun.epoch, first=first, ahead=frozenset(n for n in begun.ahead if n >= first))


def stream_of(iterator: Any) -> Any:
    """The iterator of an iterable dataset that is read here; None of any other."""
    return getattr(iterator._dataset_fetcher, "dataset_iter", None)


def dataset_state_of(fetcher: Any) -> DatasetState:
    """The state of a dataset that is read in the training process."""
    stream = getattr(fetcher, "dataset_iter", None)
    return DatasetState(
        dataset=None if stream is fetcher.dataset else state_of(fetcher.dataset),
        iterator=state_of(stream),
        has_ended=bool(getattr(fetcher, "ended", False)),
    )


def go_on_in_process(iterator: SingleProcessDataLoaderIter, resume: PassState) -> None:
    """Have the dataset, and the count of batches, where they were."""
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
