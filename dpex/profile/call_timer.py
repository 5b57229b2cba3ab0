"""Time known steps where they are called, for one batch, without changing any of them.

While a batch is made, its thread has a profile function (``sys.setprofile``), which is notified of each call. A step is
recognised by the code that runs when it is called, and by the object that it is called on. Nothing of the dataset is
replaced or patched: code that inspects a transform, its class or its attributes finds them unchanged.

Callables that run no Python code, such as a ufunc or a built-in function, are not timed. Their time counts for the step
that calls them. Functions with the same code, such as two of one decorator's, count as one.

A `StepWatch` belongs to one thread and one batch.
"""

from __future__ import annotations

import functools
import inspect
import sys
import time
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

MOST_EVENTS = 200_000
"""Events after which the rest of a batch is not timed: they take 0.1 s."""
_CALLS_TRIED = 64
"""Calls in one round of measuring the cost of timing: enough for the clock's resolution."""
_ROUNDS_TRIED = 5
"""Rounds, of which the fastest counts, as other programs only make a round slower."""


class Costs(NamedTuple):
    """Seconds that one event takes, and that recording a timed call takes in addition."""

    event_s: float
    booking_s: float


StepSeconds = tuple[int, float, float]
"""Calls of a step in a batch, and wall and CPU seconds in them without the steps within."""


class _Target(NamedTuple):
    """A step that runs some code: its name and, of a method, the object that it is called on."""

    label: str
    owner: Any = None
    is_method: bool = False

    def matches(self, frame: types.FrameType) -> bool:
        return not self.is_method or _first_argument(frame) is self.owner


class _Open:
    """A call that runs: its frame, the path of its step, the clocks when it began, and seconds in the steps within."""

    __slots__ = ("cost_s", "cpu", "key", "path", "wall", "within_cpu_s", "within_wall_s")

    def __init__(self, key: Any, path: tuple[str, ...], wall: float, cpu: float, cost_s: float) -> None:
        self.key = key
        self.path = path
        self.wall = wall
        self.cpu = cpu
        self.cost_s = cost_s
        self.within_wall_s = self.within_cpu_s = 0.0


class StepWatch:
    """See the module: `add` steps, `start`, and in any case `stop`.

    Args:
        costs: What an event and a timed call take; None: measured on this machine.
        cpu: The CPU clock, seconds.
        wall: The other clock, seconds.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        cpu: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._cpu = cpu
        self._wall = wall
        self._costs = costs or costs_here()
        self.is_whole = True
        """False if calls may have been missed."""
        self._codes: dict[int, list[_Target]] = {}
        self._alive: list[Any] = []
        self.steps: dict[tuple[str, ...], StepSeconds] = {}
        """Steps by the names of those around them and their own, in the order in which their first calls began."""
        self._open: list[_Open] = []
        self._booked = 0
        self._events = 0
        self._hook = self._make_hook()

    # -- steps -------------------------------------------------------------------------------------------------------

    def add(self, step: Any, label: str) -> None:
        """Time the calls of ``step``, if they cause events."""
        while isinstance(step, functools.partial):
            step = step.func
        if isinstance(step, types.MethodType):
            self._add_code(step.__func__, _Target(label, step.__self__, is_method=True))
        elif isinstance(step, types.FunctionType):
            self._add_code(step, _Target(label))
        elif not isinstance(step, types.BuiltinFunctionType):
            self.add_method(step, "__call__", label)

    def add_method(self, owner: Any, name: str, label: str) -> None:
        """Time the calls of that method of ``owner``, as its class defines it."""
        self._add_code(inspect.getattr_static(type(owner), name, None), _Target(label, owner, is_method=True))

    def _add_code(self, function: Any, target: _Target) -> None:
        if isinstance(function, types.FunctionType):
            code = function.__code__
            self._alive += (code, target.owner)
            self._codes.setdefault(id(code), []).append(target)

    # -- one batch ---------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Begin; False, and nothing is timed, if the thread has a profile function already."""
        if sys.getprofile() is not None:
            return False
        sys.setprofile(self._hook)
        return True

    def stop(self) -> None:
        """End, and release the steps. A profile function that other code has set meanwhile stays. Idempotent."""
        if sys.getprofile() is self._hook:
            sys.setprofile(None)
        else:
            self.is_whole = False
        self.is_whole &= not self._open
        self._open.clear()
        self._codes.clear()
        self._alive.clear()

    @property
    def cost_s(self) -> float:
        """Seconds that timing has taken so far."""
        return self._events * self._costs.event_s + self._booked * self._costs.booking_s

    def call(self, label: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` as a step of that name and return its result."""
        key = object()
        self._enter(key, label)
        try:
            return function(*args)
        finally:
            if self._open and self._open[-1].key is key:
                self._leave()

    def _make_hook(self) -> Callable[[types.FrameType, str, Any], None]:
        codes, opened = self._codes, self._open

        def hook(frame: types.FrameType, event: str, arg: Any) -> None:
            self._events += 1
            if event == "call":
                targets = codes.get(id(frame.f_code))
                if targets is not None:
                    self._called(frame, targets)
            elif event == "return" and opened and opened[-1].key is frame:
                self._leave()

        return hook

    def _called(self, frame: types.FrameType, targets: list[_Target]) -> None:
        for target in targets:
            if target.matches(frame):
                self._enter(frame, target.label)
                break
        if self._events > MOST_EVENTS:
            sys.setprofile(None)

    def _enter(self, key: Any, label: str) -> None:
        path = (*self._open[-1].path, label) if self._open else (label,)
        self.steps.setdefault(path, (0, 0.0, 0.0))
        self._open.append(_Open(key, path, self._wall(), self._cpu(), self.cost_s))

    def _leave(self) -> None:
        cpu, wall = self._cpu(), self._wall()
        call = self._open.pop()
        cost_s = self.cost_s - call.cost_s
        wall_s, cpu_s = max(0.0, wall - call.wall - cost_s), max(0.0, cpu - call.cpu - cost_s)
        calls, own_wall_s, own_cpu_s = self.steps[call.path]
        self.steps[call.path] = (
            calls + 1,
            own_wall_s + wall_s - call.within_wall_s,
            own_cpu_s + cpu_s - call.within_cpu_s,
        )
        if self._open:
            self._open[-1].within_wall_s += wall_s
            self._open[-1].within_cpu_s += cpu_s
        self._booked += 1


def _first_argument(frame: types.FrameType) -> Any:
    code = frame.f_code
    if code.co_argcount:
        return frame.f_locals.get(code.co_varnames[0])
    if code.co_flags & inspect.CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount])
        return rest[0] if rest else None
    return None


# -- what it costs -----------------------------------------------------------------------------------------------------


def _calls(function: Callable[[], Any]) -> None:
    for _ in range(_CALLS_TRIED):
        function()


def _fastest_s(function: Callable[[], Any]) -> float:
    def once() -> float:
        began = time.perf_counter()
        _calls(function)
        return time.perf_counter() - began

    return min(once() for _ in range(_ROUNDS_TRIED)) / _CALLS_TRIED


@cache
def costs_here() -> Costs:
    """Measure the costs; clocks are slow system calls in some containers. The thread must have no profile function."""
    watch = StepWatch(Costs(0.0, 0.0))

    def nothing() -> None:
        pass

    def book() -> None:
        watch._enter(None, "nothing")
        watch._leave()

    plain_s = _fastest_s(nothing)
    sys.setprofile(watch._hook)
    try:
        told_s = _fastest_s(nothing)
    finally:
        sys.setprofile(None)
    return Costs(max(0.0, told_s - plain_s) / 2, _fastest_s(book))
