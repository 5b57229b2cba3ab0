"""Raise a real signal at one place after the other where CPython looks for signals inside ``next()``.

CPython 3.11 does so as a function begins, after a call and at each jump back. A timer would meet these places by
chance.
"""

import dis
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import cycle
from pathlib import Path
from types import FrameType
from typing import Any

import torch.utils.data

import dpex
from dpex import DpexDataLoader, IteratorInterruptedError, StateError

WITHIN = (str(Path(dpex.__file__).parent), str(Path(torch.utils.data.__file__).parent))
"""Code in which signals come: dpex, and torch's loader and samplers."""
_NAMES = ("RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_FUNCTION", "CALL_METHOD", "JUMP_BACKWARD", "JUMP_ABSOLUTE")
_LOOKS = frozenset(dis.opmap[name] for name in _NAMES if name in dis.opmap)
"""Instructions after which CPython looks for signals."""
_DROPPED = frozenset({"__del__", "finalize"})
"""Functions whose exceptions Python prints and drops."""


class TickError(BaseException):
    """The exception of the signal handler. pytest would end its run at a KeyboardInterrupt."""


class LimitError(TickError, Exception):
    """The exception of every second signal: an `Exception`, as errors of datasets and samplers are."""


_kinds = cycle((TickError, LimitError))


def _raise_tick(_signal: int, _frame: Any) -> None:
    raise next(_kinds)


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

    Attributes:
        came: The signal was raised.
        place: The file, the function and the line where it was.
    """

    def __init__(self, at: int) -> None:
        self._left = at
        self._latest: dict[FrameType, int] = {}
        self.came = False
        self.place = ("", "", 0)

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if not code.co_filename.startswith(WITHIN) or code.co_name in _DROPPED:
            return None
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


@dataclass
class Swept:
    """The batches of an epoch; how many signals came, and after how many the iterator was broken; the places."""

    batches: list[Any] = field(default_factory=list)
    ticks: int = 0
    broken: int = 0
    places: set[tuple[str, str, int]] = field(default_factory=set)


def swept(loader: DpexDataLoader[Any], most: int, step: int = 1) -> Swept:
    """Take all batches of an epoch, with at most ``most`` signals: in each ``next()`` ``step`` places on, until it
    returns. After an `IteratorInterruptedError` the epoch is resumed as its message says. No signal comes in the first
    call, which draws the order of the epoch: an interrupted draw begins with another order.

    C code puts a batch into the list, as a signal between the end of ``next()`` and an assignment loses its value in
    any program.
    """
    found, iterator, at, is_over = Swept(), iter(loader), 1, False
    found.batches.extend(map(next, (iterator,)))
    saved = loader.state_dict(), 1
    while not is_over:
        tick, before = Tick(at), len(found.batches)
        sys.settrace(tick if found.ticks < most else None)
        try:
            found.batches.extend(map(next, (iterator,)))
        except TickError:
            sys.settrace(None)
            found.places.add(tick.place)
            found.ticks += 1
        except IteratorInterruptedError:
            sys.settrace(None)
            found.broken += 1
            saved = _resumed(loader, found.batches, saved)
            iterator = iter(loader)
            continue
        else:
            is_over = len(found.batches) == before
        finally:
            sys.settrace(None)
        at = at + step if tick.came else 1 + len(found.batches) % step
        if len(found.batches) > before and not tick.came:
            saved = loader.state_dict(), len(found.batches)
    return found


def _resumed(loader: DpexDataLoader[Any], batches: list[Any], saved: tuple[Any, int]) -> tuple[Any, int]:
    """Load the state of a broken iterator, or the latest state if it has none. Return the state and its batches."""
    try:
        state = loader.state_dict(), len(batches)
    except StateError:
        state = saved
        del batches[saved[1] :]
    loader.load_state_dict(state[0])
    return state
