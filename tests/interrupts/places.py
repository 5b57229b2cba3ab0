"""Raise a real signal at one place after the other where CPython looks for signals inside ``next()``.

CPython 3.11 does so as a function begins, after a call and at each jump back. A timer would meet these places by
chance.
"""

import dis
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch.utils.data
from torch.utils.data import IterableDataset

import dpex
from dpex.engine.engine import Engine

WITHIN = (str(Path(dpex.__file__).parent), str(Path(torch.utils.data.__file__).parent))
"""Code in which signals come: dpex, and torch's loader and samplers."""
_NAMES = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_FUNCTION", "CALL_METHOD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_LOOKS = frozenset(dis.opmap[name] for name in _NAMES if name in dis.opmap)
"""Instructions after which CPython looks for signals."""
RENEWAL = Engine._renew.__code__
_DROPPED = frozenset({"__del__", "finalize"})
"""Functions whose exceptions Python prints and drops."""


class TickError(Exception):
    """What the signal handler raises."""


def _raise_tick(_signal: int, _frame: Any) -> None:
    raise TickError


@contextmanager
def raising_handler() -> Iterator[None]:
    """Have SIGUSR1 raise `TickError` for a ``with`` block."""
    former = signal.signal(signal.SIGUSR1, _raise_tick)
    try:
        yield
    finally:
        sys.settrace(None)
        signal.signal(signal.SIGUSR1, former)


class Tick:
    """A trace function. It raises the signal at the ``at``-th place where CPython looks for signals.

    Args:
        at: The number of the place.
        in_renewals: Places within a renewal of the engine count, too. They are many.

    Attributes:
        came: The signal was raised.
        place: The file, the function and the line where it was.
    """

    def __init__(self, at: int, *, in_renewals: bool = True) -> None:
        self._left = at
        self._in_renewals = in_renewals
        self._is_renewing = False
        self._latest: dict[FrameType, int] = {}
        self.came = False
        self.place = ("", "", 0)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if self._is_renewing or not code.co_filename.startswith(WITHIN) or code.co_name in _DROPPED:
            return None
        if code is RENEWAL and not self._in_renewals:
            self._is_renewing, frame.f_trace_lines = True, False
            return self._end_of_renewal
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return self._step

    def _step(self, frame: FrameType, event: str, _: Any) -> Any:
        if event == "opcode":
            opcode = frame.f_code.co_code[frame.f_lasti]
            if self._latest.get(frame) in _LOOKS and opcode not in _LOOKS:
                self._left -= 1
                if not self._left:
                    self.came, code = True, frame.f_code
                    self.place = code.co_filename, code.co_name, frame.f_lineno
                    sys.settrace(None)
                    signal.raise_signal(signal.SIGUSR1)
            self._latest[frame] = opcode
        return self._step

    def _end_of_renewal(self, _frame: FrameType, event: str, _: Any) -> Any:
        self._is_renewing = event != "return"
        return self._end_of_renewal


class Counted(IterableDataset[int]):
    """Numbers below ``rows``, with a state."""

    def __init__(self, rows: int) -> None:
        self.rows = rows
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        while self.at < self.rows:
            self.at += 1
            yield self.at - 1

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Swept(NamedTuple):
    """The batches of a pass, the number of signals that came, and the places where they did."""

    batches: list[Any]
    ticks: int
    places: set[tuple[str, str, int]]


def swept(iterator: Iterator[Any], most: int, step: int = 1, *, in_renewals: bool = True) -> Swept:
    """Take all batches, with at most ``most`` signals: in each call of ``next()`` ``step`` places on, until it returns.

    C code puts a batch into the list, as a signal between the end of ``next()`` and an assignment loses its value in
    any program.
    """
    found = Swept([], 0, set())
    at = 1
    while found.ticks < most:
        tick, before = Tick(at, in_renewals=in_renewals), len(found.batches)
        sys.settrace(tick)
        try:
            found.batches.extend(map(next, (iterator,)))
        except TickError:
            found.places.add(tick.place)
            found = found._replace(ticks=found.ticks + 1)
        else:
            if len(found.batches) == before:
                return found
        finally:
            sys.settrace(None)
        at = at + step if tick.came else 1 + len(found.batches) % step
    found.batches.extend(iterator)
    return found
