"""The state of a pass as dicts and lists of numbers, strings and tensors, which `torch.save` and
``torch.load(weights_only=True)`` accept, and back.

Random states are such values from the start (`dpex.worker.rng_state`). What a dataset or a sampler says of itself, and
the tuples and strings of a sampler's indices, are left as they are.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from dpex.engine.pass_state import PassState
from dpex.engine.sampler_start import SamplerStart
from dpex.schedule.progress import LogicalPoint, ResumePoint, TicketRun, TicketRuns
from dpex.schedule.sample_policy import LeavingOut
from dpex.worker.rng_state import check_global_states, plain
from dpex.worker.states import DatasetState, LogicalState, pack_state, unpack_state

_INDEX, _LEFT_OUT = "index", "left_out"
"""Keys in a dict that stands for an index of which some samples are not to be loaded."""


def _start_of(values: Mapping[str, Any]) -> SamplerStart:
    start = SamplerStart(**values)
    check_global_states(start.shared)
    if not all(isinstance(state, torch.Tensor) for state in start.generators.values()):
        raise TypeError("the state of a generator of torch's is a tensor")
    return start


# -- logical workers ---------------------------------------------------------------------------------------------------


def plain_dataset(state: DatasetState | None) -> dict[str, Any] | None:
    """Return the state of a dataset as a dict. What the dataset says of itself is in it as it is."""
    if state is None:
        return None
    return {name: getattr(state, name) for name in ("epoch", "dataset", "iterator", "has_ended")}


def dataset_of(values: Mapping[str, Any] | None) -> DatasetState | None:
    """Return the value that `plain_dataset` was given."""
    return None if values is None else DatasetState(**values)


def plain_index(index: Any) -> Any:
    """Return an index of a batch without objects of dpex's and NumPy's."""
    if isinstance(index, LeavingOut):
        return {_INDEX: plain(index.index), _LEFT_OUT: dict(index.places)}
    return plain(index)


def index_of(value: Any) -> Any:
    """Return the index that `plain_index` was given."""
    if isinstance(value, dict) and value.keys() == {_INDEX, _LEFT_OUT}:
        return LeavingOut(index=value[_INDEX], places=value[_LEFT_OUT])
    return value


def _plain_run(run: TicketRun) -> list[Any]:
    return list(run._replace(index=plain_index(run.index)))


def _run_of(epoch: int, first: int, index: Any, step: int, length: int) -> TicketRun:
    return TicketRun(epoch, first, index_of(index), step, length)


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


# -- a pass ------------------------------------------------------------------------------------------------------------


def plain_pass(state: PassState, dataset: DatasetState | None) -> dict[str, Any]:
    """Return the state of a pass. dataset: of one that is read in the training process."""
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
        "streams": point.streams,
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
        streams=int(values["streams"]),
        read=None if values["read"] is None else _point_of(values["read"], index),
    )


def pass_of(values: Mapping[str, Any], index: Any) -> PassState:
    """Return the value that `plain_pass` was given. index: what a batch of a stream is asked for."""
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
