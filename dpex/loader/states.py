"""States of a loader: `state_dict` and `load_state_dict` of `dpex.DpexDataLoader`.

A state records the dataset, batch size, order and seeds of its loader. A loader that differs refuses it (`StateError`).

A state consists of dicts and lists of numbers, strings and tensors, which `torch.save` and
``torch.load(weights_only=True)`` accept. `dpex.worker.states` reads random states as such values. States that a dataset
or a sampler returns, and the tuples and strings of a sampler's indices, are not converted.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, DistributedSampler

from dpex._torch import DatasetKind
from dpex.engine.pass_state import PassState, dataset_state_of
from dpex.engine.samplers import SamplerStart, generators_of, samplers_within
from dpex.errors import StateError
from dpex.loader.sizing import Sizing
from dpex.loader.streams import launcher_environment
from dpex.measure.readable import plural
from dpex.schedule.names import length_of
from dpex.schedule.progress import LogicalPoint, ResumePoint, TicketRun, TicketRuns
from dpex.schedule.sample_policy import LeavingOut
from dpex.system.cpus import ranks
from dpex.system.user_warnings import warn
from dpex.worker.states import DatasetState, LogicalState, check_global_states, pack_state, plain, unpack_state

if TYPE_CHECKING:
    from dpex.loader.base_loader import BaseLoader

VERSION = 1
"""The version of written states, and the version that `resume_from` reads."""
_INDEX, _LEFT_OUT = "index", "left_out"
"""Keys of the dict that represents a `LeavingOut`: an index, and the samples in it that are not loaded."""


def state_of(loader: BaseLoader[Any]) -> dict[str, Any]:
    """See `dpex.DpexDataLoader.state_dict`."""
    runtime = loader._runtime
    if runtime.loaded is not None:
        return dict(copy.deepcopy(runtime.loaded))
    why_not = _why_stateless(loader)
    if why_not:
        return {"version": VERSION, "why_not": why_not}
    runtime.ask_states()
    if runtime.last_state is None:
        loader._begun = DataLoader.__iter__(loader)  # a subclass's `__iter__` would change batches twice
    runtime.await_first_states(has_init_fn=loader.worker_init_fn is not None)
    found = None if runtime.last_state is None else runtime.last_state.read()
    if found is None:
        raise StateError(
            "the state of the epoch could not be read. If another thread is in next(), call state_dict() in the thread "
            "that iterates. If an exception interrupted next(), load the latest state that you saved"
        )
    dataset = found.dataset if found.fetcher is None else dataset_state_of(found.fetcher)
    return {"version": VERSION, "of": identity_of(loader), **plain_pass(found, dataset)}


def resume_from(loader: BaseLoader[Any], state_dict: Mapping[str, Any]) -> None:
    """See `dpex.DpexDataLoader.load_state_dict`."""
    if not isinstance(state_dict, Mapping) or not state_dict:
        raise StateError(
            f"load_state_dict({state_dict!r:.80}): it is no state. Give what state_dict() of a loader returned, "
            "and do not call load_state_dict() in a run that begins anew"
        )
    _check_kind(state_dict)
    if "why_not" in state_dict:
        _forget_passes(loader)
        warn(f"the state holds no position, so that the epoch begins anew: {state_dict['why_not']}")
        return
    check_identity(state_dict["of"], loader)
    state = copy.deepcopy(dict(state_dict))
    try:
        # for a stream, torch's sampler yields this second argument as the index of each batch
        resume = pass_of(state, None if loader.batch_size is None else [None] * loader.batch_size)
    except Exception as error:  # the libraries' generators refuse states in many ways
        raise StateError(f"the state cannot be read: {error!r}; load one that state_dict() returned") from error
    _forget_passes(loader)
    if resume.has_finished:  # `only_later` keeps an epoch that the training loop has set already
        resume.start.apply_epochs(loader._index_sampler, only_later=True)
    loader._runtime.loaded, loader._runtime.resume = state, resume
    loader._runtime.ask_states()


def _forget_passes(loader: BaseLoader[Any]) -> None:
    loader._iterator, loader._begun = None, None
    loader._runtime.loaded = loader._runtime.resume = None


def _why_stateless(loader: BaseLoader[Any]) -> str:
    """Return the reason if a loader has no state to report, else ""."""
    sizing = Sizing(loader)
    if sizing.is_piped:
        return "DataPipes are PyTorch's to read"
    if sizing.is_split and not loader.in_order:
        return "with in_order=False samples are delivered in another order than they were read: give in_order=True"
    return "" if sizing.why_torch is None else f"PyTorch's own iterators make the batches ({sizing.why_torch})"


def _check_kind(state: Mapping[str, Any]) -> None:
    version = state.get("version")
    if version != VERSION:
        keys = ", ".join(map(repr, islice(state, 4)))
        raise StateError(
            f"the state has version {version!r} (its keys begin with {keys}), and this release of dpex reads version "
            f"{VERSION}: load a state that state_dict() of a DpexDataLoader of this release returned"
        )
    if "why_not" not in state and not isinstance(state.get("of"), Mapping):
        raise StateError("the state does not say which loader it is of: load one that state_dict() returned")


# -- identity ----------------------------------------------------------------------------------------------------------

_WORDS = {
    "dataset": ("the dataset {0}", "load it with the dataset that it was saved with"),
    "samples": ("{0} samples", "load it with the same samples"),
    "batch_size": ("batch_size={0}", "give it the same batch size"),
    "global_batch": (
        "{0} samples in the batches of all ranks together",
        "change the batch size with the number of ranks",
    ),
    "ranks": (
        "a part of the stream for {0}",
        "resume a stream on the same number of ranks, because each rank's part depends on it",
    ),
    "drop_last": ("drop_last={0}", "give it the same"),
    "sampler": ("the sampler {0}", "give it the same kind of sampler"),
    "seeding": ("seeding={0!r}", "give it the same"),
    "workers": (
        "num_workers={0}",
        "give it the same number; with seeding='batch' a map-style dataset may have any",
    ),
    "seed": ("the seed {0}", "give its generator, or its sampler, the same seed"),
}
"""For each property: its value in words, and the remedy if the state and the loader differ."""


def identity_of(loader: BaseLoader[Any]) -> dict[str, Any]:
    """Return the properties of a loader that a state must match, as plain values."""
    is_stream = loader._dataset_kind == DatasetKind.Iterable
    is_free = loader.seeding == "batch" and not is_stream
    samplers = [sampler for _, sampler in samplers_within(loader._index_sampler)]
    found = {
        "dataset": type(loader.dataset).__qualname__,
        "samples": None if is_stream else length_of(loader.dataset),
        "ranks": plural(ranks(launcher_environment()), "rank") if is_stream else None,
        "drop_last": bool(loader.drop_last),
        "sampler": None if is_stream else " of ".join(type(one).__name__ for one in samplers),
        "seeding": loader.seeding,
        "workers": None if is_free else int(loader.num_workers),
        "seed": None if is_stream else _seeds(loader),
    }
    return found | _batch_size(loader)


def _seeds(loader: BaseLoader[Any]) -> dict[str, int]:
    seeds = {name: each.initial_seed() for name, each in generators_of(loader._index_sampler, loader.generator).items()}
    for name, sampler in samplers_within(loader._index_sampler):
        if isinstance(sampler, DistributedSampler):
            seeds[name] = sampler.seed
    return seeds


def _batch_size(loader: BaseLoader[Any]) -> dict[str, Any]:
    distributed = [s for _, s in samplers_within(loader._index_sampler) if isinstance(s, DistributedSampler)]
    if not distributed or loader.batch_size is None:
        return {"batch_size": loader.batch_size}
    return {"global_batch": loader.batch_size * distributed[0].num_replicas}


def check_identity(saved: Mapping[str, Any], loader: BaseLoader[Any]) -> None:
    """Raise StateError if a state belongs to another loader. The message has the values of the state and of the
    loader."""
    found = identity_of(loader)
    for name, (words, remedy) in _WORDS.items():
        theirs, ours = saved.get(name), found.get(name)
        if theirs != ours:
            raise StateError(
                f"the state is of {words.format(theirs)}, and the loader has {words.format(ours)}; {remedy}"
            )


# -- logical workers, as plain values and back -------------------------------------------------------------------------


def plain_dataset(state: DatasetState | None) -> dict[str, Any] | None:
    """Return the state of a dataset as a dict, which contains the dataset's own state unchanged."""
    if state is None:
        return None
    return {name: getattr(state, name) for name in ("epoch", "dataset", "iterator", "has_ended")}


def dataset_of(values: Mapping[str, Any] | None) -> DatasetState | None:
    """Return the state of a dataset from the result of `plain_dataset`."""
    return None if values is None else DatasetState(**values)


def plain_index(index: Any) -> Any:
    """Return the index of a batch as plain values, without objects of dpex and NumPy."""
    if isinstance(index, LeavingOut):
        return {_INDEX: plain(index.index), _LEFT_OUT: dict(index.places)}
    return plain(index)


def index_of(value: Any) -> Any:
    """Return the index of a batch from the result of `plain_index`."""
    if isinstance(value, dict) and value.keys() == {_INDEX, _LEFT_OUT}:
        return LeavingOut(index=value[_INDEX], places=value[_LEFT_OUT])
    return value


def _plain_run(run: TicketRun) -> list[Any]:
    return [run.epoch, run.numbers[0], plain_index(run.index), run.numbers.step, len(run.numbers)]


def _run_of(epoch: int, first: int, index: Any, step: int, length: int) -> TicketRun:
    return TicketRun(epoch, range(first, first + step * length, step), index_of(index))


def _plain_logical(point: LogicalPoint) -> dict[str, Any]:
    state = LogicalState() if point.state is None else unpack_state(point.state)
    return {
        "random": state.random,
        "dataset": plain_dataset(state.dataset),
        "own": state.own,
        "again": [_plain_run(run) for run in TicketRuns(point.again).runs],
        "batches": point.batches,
        "has_ended": point.has_ended,
    }


def _logical(values: Mapping[str, Any], epoch: int, index: Any) -> LogicalPoint:
    check_global_states(values["random"] or {})
    dataset = dataset_of(values["dataset"])
    if values["batches"] and dataset is None:
        dataset = DatasetState(epoch=epoch, skip=values["batches"], index=index)
    state = LogicalState(values["random"], dataset, values["own"])
    return LogicalPoint(
        state=None if state == LogicalState() else pack_state(state),
        again=tuple(ticket for run in values["again"] for ticket in _run_of(*run).tickets()),
        batches=values["batches"],
        has_ended=values["has_ended"],
    )


# -- a pass, as plain values and back ----------------------------------------------------------------------------------


def plain_pass(state: PassState, dataset: DatasetState | None) -> dict[str, Any]:
    """Return the state of a pass. dataset: the state of a dataset that is read in the training process."""
    return {
        **_plain_point(state.point),
        "finished": state.has_finished,
        "persists": state.persists,
        "base_seed": state.base_seed,
        "start": {name: dict(values) for name, values in vars(state.start).items()},
        "sampler": None if state.sampler is None else list(state.sampler),
        "dataset": plain_dataset(dataset),
    }


def _plain_point(point: ResumePoint) -> dict[str, Any]:
    return {
        "epoch": point.epoch,
        "batches": point.first,
        "ahead": sorted(point.ahead),
        "turn": point.turn,
        "workers": [_plain_logical(logical) for logical in point.logicals],
        "read": None if point.read is None else _plain_point(point.read),
    }


def _point_of(values: Mapping[str, Any], index: Any) -> ResumePoint:
    epoch = int(values["epoch"])
    return ResumePoint(
        epoch=epoch,
        first=int(values["batches"]),
        ahead=frozenset(values["ahead"]),
        turn=int(values["turn"]),
        logicals=tuple(_logical(each, epoch, index) for each in values["workers"]),
        read=None if values["read"] is None else _point_of(values["read"], index),
    )


def pass_of(values: Mapping[str, Any], index: Any) -> PassState:
    """Return the state of a pass from the result of `plain_pass`. index: the index of each batch of a stream."""
    point = _point_of(values, index)
    return PassState(
        base_seed=int(values["base_seed"]),
        start=_start_of(values["start"]),
        point=point,
        batches=point.first,
        sampler=None if values["sampler"] is None else (int(values["sampler"][0]), values["sampler"][1]),
        dataset=dataset_of(values["dataset"]),
        has_finished=bool(values["finished"]),
        persists=bool(values["persists"]),
    )


def _start_of(values: Mapping[str, Any]) -> SamplerStart:
    start = SamplerStart(**values)
    check_global_states(start.shared)
    if not all(isinstance(state, torch.Tensor) for state in start.generators.values()):
        raise TypeError("the state of a torch generator must be a tensor")
    return start
