"""States as plain values: numbers, strings, lists and dicts, so that a checkpoint can hold them as JSON.

Nothing in them is code or a pickle: bytes are base64. What a dataset or a sampler says of itself is left as it is.
"""

from __future__ import annotations

import base64
import binascii
from array import array
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from dpex.core.first_stream import ALL
from dpex.core.logical_log import LogicalPoint
from dpex.core.resume_point import ResumePoint
from dpex.core.sample_policy import LeavingOut
from dpex.core.ticket_runs import TicketRun, TicketRuns
from dpex.engine.pass_state import PassState
from dpex.engine.sampler_start import SamplerStart
from dpex.errors import StateError
from dpex.worker.logical_state import DatasetState, LogicalState, RandomStates, pack_state, unpack_state
from dpex.worker.own_states import OwnStates

_PYTHON_WORD = "I"
"""Words of Python's generator have 32 bits."""
_TUPLE = "tuple"
"""Key in a dict that stands for a tuple, which JSON has not."""
_DICT, _ARRAY, _BYTES = "dict", "array", "bytes"
"""Keys in a dict that stands for such a value in the state of a generator."""
_INDEX, _LEFT_OUT = "index", "left_out"
"""Keys in a dict that stands for an index of which some samples are not to be loaded."""


def text_of(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode("ascii")


def bytes_of(text: Any) -> bytes:
    """The bytes again. Raises StateError where it is no such text."""
    try:
        return base64.b64decode(text, validate=True)
    except (TypeError, binascii.Error) as error:
        raise StateError(f"{str(text)[:40]!r} is no base64") from error


def _plain_tensor(state: torch.Tensor | None) -> str | None:
    return None if state is None else text_of(state.numpy().tobytes())


def _tensor(text: str | None) -> torch.Tensor | None:
    return None if text is None else torch.frombuffer(bytearray(bytes_of(text)), dtype=torch.uint8)


def _plain_python(state: Any) -> list[Any] | None:
    if state is None:
        return None
    version, words, gauss = state
    return [version, text_of(array(_PYTHON_WORD, words).tobytes()), gauss]


def _python(state: Any) -> Any:
    if state is None:
        return None
    version, words, gauss = state
    return version, tuple(array(_PYTHON_WORD, bytes_of(words))), gauss


def _plain_numpy(state: Any) -> list[Any] | None:
    if state is None:
        return None
    name, words, at, has_gauss, gauss = state
    return [name, text_of(np.asarray(words, np.uint32).tobytes()), int(at), int(has_gauss), float(gauss)]


def _numpy(state: Any) -> Any:
    if state is None:
        return None
    name, words, at, has_gauss, gauss = state
    return name, np.frombuffer(bytes_of(words), np.uint32), at, has_gauss, gauss


# -- what a sampler began with -----------------------------------------------------------------------------------------


def plain_start(start: SamplerStart) -> dict[str, Any]:
    """The random states of a sampler's start."""
    return {
        "generators": {name: _plain_tensor(state) for name, state in start.generators.items()},
        "epochs": dict(start.epochs),
        "torch": _plain_tensor(start.torch_state),
        "python": _plain_python(start.python),
        "numpy": _plain_numpy(start.numpy),
    }


def start_of(plain: Mapping[str, Any]) -> SamplerStart:
    """The value again."""
    generators = {name: _tensor(text) for name, text in plain["generators"].items()}
    return SamplerStart(
        generators={name: state for name, state in generators.items() if state is not None},
        epochs={name: int(epoch) for name, epoch in plain["epochs"].items()},
        torch_state=_tensor(plain["torch"]),
        python=_python(plain["python"]),
        numpy=_numpy(plain["numpy"]),
    )


# -- logical workers ---------------------------------------------------------------------------------------------------


def _plain_random(states: RandomStates | None) -> dict[str, Any] | None:
    if states is None:
        return None
    python, numpy, torch_state = states
    return {"python": _plain_python(python), "numpy": _plain_numpy(numpy), "torch": text_of(torch_state)}


def _random(plain: Mapping[str, Any] | None) -> RandomStates | None:
    if plain is None:
        return None
    return _python(plain["python"]), _numpy(plain["numpy"]), bytes_of(plain["torch"])


def _plain_own(states: OwnStates | None) -> dict[str, Any] | None:
    return None if states is None else {place: _plain_state(state) for place, state in states.items()}


def _own(plain: Mapping[str, Any] | None) -> OwnStates | None:
    return None if plain is None else {place: _state(each) for place, each in plain.items()}


def _plain_state(state: Any) -> Any:
    """A state of any generator, or a part of it: numbers and texts are left as they are."""
    if isinstance(state, dict):
        return {_DICT: {key: _plain_state(each) for key, each in state.items()}}
    if isinstance(state, tuple):
        return {_TUPLE: [_plain_state(each) for each in state]}
    if isinstance(state, np.ndarray):
        return {_ARRAY: [state.dtype.str, text_of(state.tobytes())]}
    if isinstance(state, bytes):
        return {_BYTES: text_of(state)}
    return state.item() if isinstance(state, np.generic) else state


def _state(plain: Any) -> Any:
    if not isinstance(plain, dict):
        return plain
    ((kind, value),) = plain.items()
    if kind == _DICT:
        return {key: _state(each) for key, each in value.items()}
    if kind == _TUPLE:
        return tuple(_state(each) for each in value)
    if kind == _BYTES:
        return bytes_of(value)
    dtype, text = value
    return np.frombuffer(bytes_of(text), dtype)


def plain_dataset(state: DatasetState | None) -> dict[str, Any] | None:
    """The state of a dataset, as it told it."""
    if state is None:
        return None
    told = {"dataset": state.dataset, "iterator": state.iterator}
    return {"epoch": state.epoch, **told, "has_ended": state.has_ended}


def dataset_of(plain: Mapping[str, Any] | None) -> DatasetState | None:
    """The value again."""
    return None if plain is None else DatasetState(**plain)


def _plain_index(index: Any) -> Any:
    if isinstance(index, LeavingOut):
        return {_INDEX: _plain_index(index.index), _LEFT_OUT: {str(place): why for place, why in index.places.items()}}
    if isinstance(index, tuple) and type(index) is tuple:
        return {_TUPLE: [_plain_index(each) for each in index]}
    if isinstance(index, list):
        return [_plain_index(each) for each in index]
    return index.item() if isinstance(index, np.generic) else index


def _index(plain: Any) -> Any:
    if isinstance(plain, dict) and plain.keys() == {_TUPLE}:
        return tuple(_index(each) for each in plain[_TUPLE])
    if isinstance(plain, dict) and plain.keys() == {_INDEX, _LEFT_OUT}:
        return LeavingOut(
            index=_index(plain[_INDEX]), places={int(place): why for place, why in plain[_LEFT_OUT].items()}
        )
    return [_index(each) for each in plain] if isinstance(plain, list) else plain


def _plain_run(run: TicketRun) -> list[Any]:
    """Tickets to be made again; of a single one its epoch, number and index."""
    first = [run.epoch, run.first, _plain_index(run.index)]
    return first if run.length == 1 else [*first, run.step, run.length]


def _run(epoch: int, first: int, index: Any, step: int = 1, count: int = 1) -> TicketRun:
    return TicketRun(epoch, first, _index(index), step, count)


def _plain_logical(point: LogicalPoint) -> dict[str, Any]:
    state = LogicalState() if point.state is None else unpack_state(point.state)
    return {
        "random": _plain_random(state.random),
        "dataset": plain_dataset(state.dataset),
        "own": _plain_own(state.own),
        "again": [_plain_run(run) for run in TicketRuns(point.again).runs],
        "batches": point.batches,
        "has_ended": point.has_ended,
    }


def _logical(plain: Mapping[str, Any], epoch: int, index: Any) -> LogicalPoint:
    random, dataset = _random(plain["random"]), dataset_of(plain["dataset"])
    if plain["batches"] and dataset is None:
        dataset = DatasetState(epoch=epoch, skip=plain["batches"], index=index)
    state = LogicalState(random, dataset, _own(plain.get("own")))  # an earlier dpex wrote none
    return LogicalPoint(
        state=None if state == LogicalState() else pack_state(state),
        again=tuple(ticket for run in plain["again"] for ticket in _run(*run).tickets()),
        batches=plain["batches"],
        has_ended=plain["has_ended"],
    )


# -- a pass ------------------------------------------------------------------------------------------------------------


def plain_pass(state: PassState, dataset: DatasetState | None) -> dict[str, Any]:
    """The state of a pass. dataset: of one that is read in the training process."""
    return {
        **_plain_point(state.point),
        "finished": state.has_finished,
        "persists": state.persists,
        "base_seed": state.base_seed,
        "start": plain_start(state.start),
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


def _point_of(plain: Mapping[str, Any], index: Any) -> ResumePoint:
    epoch = int(plain["epoch"])
    return ResumePoint(
        epoch=epoch,
        first=int(plain["batches"]),
        ahead=frozenset(plain["ahead"]),
        turn=int(plain["turn"]),
        logicals=tuple(_logical(each, epoch, index) for each in plain["workers"]),
        streams=int(plain.get("streams", ALL)),  # an earlier dpex wrote none
        read=None if plain["read"] is None else _point_of(plain["read"], index),
    )


def pass_of(plain: Mapping[str, Any], index: Any) -> PassState:
    """The value again. index: what a batch of a stream is asked for."""
    point = _point_of(plain, index)
    return PassState(
        base_seed=int(plain["base_seed"]),
        start=start_of(plain["start"]),
        point=point,
        batches=point.first,
        sampler=None if plain["sampler"] is None else (int(plain["sampler"][0]), plain["sampler"][1]),
        dataset=dataset_of(plain["dataset"]),
        has_finished=bool(plain["finished"]),
        persists=bool(plain["persists"]),
    )
