"""An exception of a signal handler inside ``next()`` of a stream, with a state and without one."""

import contextlib
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import Any

import pytest
from places import Counted, TickError
from torch.utils.data import IterableDataset

from dpex import DpexDataLoader, InterruptedStreamError, decode_in_workers
from dpex.engine.engine import Engine

ROWS = 40


class Stateless(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield from range(ROWS)


def interrupt_in(code: Any, call: Any) -> None:
    """Call ``call``; the signal comes as the function of that code begins."""

    def trace(frame: FrameType, _event: str, _: Any) -> None:
        if frame.f_code is code:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    sys.settrace(trace)
    try:
        with pytest.raises(TickError):
            call()
    finally:
        sys.settrace(None)


FILLING = Engine._fill.__code__
"""It runs after a batch was delivered, and before ``next()`` returns it."""


def rest_of(iterator: Iterator[Any]) -> list[int]:
    return [int(number) for batch in iterator for number in batch]


@pytest.mark.parametrize("stream", [Stateless(), Counted(ROWS)], ids=["without a state", "with one"])
def test_a_short_stream_goes_on(stream: Any) -> None:
    with DpexDataLoader(stream, batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        seen = next(iterator).tolist()
        interrupt_in(FILLING, lambda: next(iterator))
        assert seen + rest_of(iterator) == list(range(ROWS))


def test_the_state_of_a_stream_after_an_interrupt_has_the_batch() -> None:
    with DpexDataLoader(Counted(ROWS), batch_size=4, num_workers=1) as loader:
        loader.state_dict()
        iterator = iter(loader)
        seen = next(iterator).tolist()
        interrupt_in(FILLING, lambda: next(iterator))
        state = loader.state_dict()
    with DpexDataLoader(Counted(ROWS), batch_size=4, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert seen + rest_of(iter(loader)) == list(range(ROWS))


def test_a_long_stream_without_a_state_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.engine.engine.READ_AGAIN_S", 0.0)
    with DpexDataLoader(Stateless(), batch_size=4, num_workers=1) as loader:
        iterator = iter(loader)
        next(iterator)
        interrupt_in(FILLING, lambda: next(iterator))
        for _ in range(2):
            with pytest.raises(InterruptedStreamError, match="state_dict"):
                next(iterator)
        assert rest_of(iter(loader)) == list(range(ROWS))


def test_the_state_of_a_decoded_stream_after_an_interrupted_read() -> None:
    """The reading starts anew behind the batches that were decoded and delivered, not behind those that were read."""

    def loader() -> DpexDataLoader[Any]:
        stream = decode_in_workers(Counted(ROWS), int)
        return DpexDataLoader(stream, batch_size=4, num_workers=1, seeding="batch")

    def trace(frame: FrameType, _event: str, _: Any) -> None:
        if frame.f_code is FILLING and "read_ahead" in {each.f_code.co_name for each in outer(frame)}:
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)

    with loader() as interrupted:
        interrupted.state_dict()
        iterator = iter(interrupted)
        seen = [*next(iterator).tolist(), *next(iterator).tolist()]
        sys.settrace(trace)
        with contextlib.suppress(TickError):
            while True:
                seen += next(iterator).tolist()
        assert len(seen) < ROWS
        seen += next(iterator).tolist()
        state = interrupted.state_dict()
        assert seen + rest_of(iterator) == list(range(ROWS))
    with loader() as resumed:
        resumed.load_state_dict(state)
        assert seen + rest_of(iter(resumed)) == list(range(ROWS))


def outer(frame: FrameType | None) -> Iterator[FrameType]:
    """Yield the frames that called ``frame``."""
    while frame is not None:
        yield frame
        frame = frame.f_back
