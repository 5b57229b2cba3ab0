"""Time known steps during one batch, without changing them.

While a batch is made, its thread has a profile function (``sys.setprofile``), which CPython calls at each call. The
dataset is not patched: code that inspects a transform, its class or its attributes finds them unchanged.

A frame does not name its function, and functions of one decorator or factory share their code. So a step is recognised
by its code and its values: the object of a method, the enclosed variables, the arguments of a ``partial``, and the
defaults of an inner function. Steps with equal code and values but different names are not timed. Neither are callables
without Python code, such as a built-in function. Their time counts for the calling step.

With `WatchedGenerators` the watch also reports which steps draw random numbers. It compares the states of the
generators at each begin and end of a step of the first sample.

A `StepWatch` belongs to one thread and one batch.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import time
import types
from collections.abc import Callable
from functools import cache
from operator import is_
from typing import Any, NamedTuple, Protocol

from dpex.system.clock import monotonic

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
Path = tuple[str, ...]
"""The names of the steps around a step, and its own."""
_ABSENT = object()
"""Stands for a variable without a value. It is the same as no other object."""


class WatchedGenerators(Protocol):
    """The random generators that a dataset may draw from (`dpex.worker.draws`)."""

    functions: tuple[tuple[Any, dict[str, Any]], ...]
    """Functions that give random numbers, with the values of their arguments for which they do."""

    def meet(self, names: tuple[str, ...], values: dict[str, Any]) -> None:
        """Add the generators among the global variables ``values`` that a function uses by these names."""

    def moved(self) -> bool:
        """Return True if a generator has another state than at the call before."""


class _Target:
    """A step that runs some code, with the values that distinguish it from other functions with this code.

    Args:
        label: The step's name; "": a source of random numbers; None: indistinguishable steps.
        function: The function that runs.
        bound: Values of its first arguments.
        named: Values of other arguments, by name.
    """

    def __init__(
        self,
        label: str | None,
        function: types.FunctionType,
        bound: tuple[Any, ...] = (),
        named: dict[str, Any] | None = None,
    ) -> None:
        code = function.__code__
        is_made_anew = code.co_flags & inspect.CO_NESTED or code.co_name == "<lambda>"
        cells = zip(code.co_freevars, map(_content, function.__closure__ or ()), strict=True)
        self.label, self._bound = label, bound
        self._expected = {**(_defaults(function) if is_made_anew else {}), **dict(cells), **(named or {})}
        for name in code.co_varnames[: min(len(bound), code.co_argcount)]:
            self._expected.pop(name, None)

    @property
    def identity(self) -> tuple[Any, ...]:
        """The values that distinguish this step from steps with the same code."""
        return tuple(map(id, self._bound)), tuple(sorted((name, id(one)) for name, one in self._expected.items()))

    @property
    def weight(self) -> int:
        """The number of these values: a ``partial`` has more than its bare function."""
        return len(self._bound) + len(self._expected)

    def matches(self, frame: types.FrameType) -> bool:
        """Return True if this call is one of the step's."""
        positional, values = _arguments(frame)
        return (
            len(positional) >= len(self._bound)
            and all(map(is_, self._bound, positional))
            and all(values.get(name, _ABSENT) is one for name, one in self._expected.items())
        )


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:
        return _ABSENT


def _defaults(function: types.FunctionType) -> dict[str, Any]:
    names, values = function.__code__.co_varnames[: function.__code__.co_argcount], function.__defaults__ or ()
    return {**dict(zip(names[len(names) - len(values) :], values, strict=True)), **(function.__kwdefaults__ or {})}


def _arguments(frame: types.FrameType) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments that a call got in order, and all its variables with those that it got by name."""
    code, found = frame.f_code, frame.f_locals
    positional = [found.get(name, _ABSENT) for name in code.co_varnames[: code.co_argcount]]
    at = code.co_argcount + code.co_kwonlyargcount
    if code.co_flags & inspect.CO_VARARGS:
        positional += found.get(code.co_varnames[at], ())
        at += 1
    others = found.get(code.co_varnames[at], {}) if code.co_flags & inspect.CO_VARKEYWORDS else {}
    return positional, {**found, **others}


class _Open:
    """A call that runs: its frame, the path of its step, the clocks when it began, and seconds in the steps within."""

    __slots__ = ("cost_s", "cpu", "key", "path", "wall", "within_cpu_s", "within_wall_s")

    def __init__(self, key: Any, path: Path, wall: float, cpu: float, cost_s: float) -> None:
        self.key = key
        self.path = path
        self.wall = wall
        self.cpu = cpu
        self.cost_s = cost_s
        self.within_wall_s = self.within_cpu_s = 0.0


class StepWatch:
    """See the module: `add` steps, `start`, and in any case `stop`.

    Args:
        costs: Seconds of an event and of a timed call; None: measured.
        cpu: The CPU clock, in seconds.
        wall: The wall clock, in seconds.
        draws: The random generators, or None.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        cpu: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = monotonic,
        draws: WatchedGenerators | None = None,
    ) -> None:
        self._cpu = cpu
        self._wall = wall
        self._costs = costs or costs_here()
        self.is_whole: bool = True
        """False if calls may have been missed."""
        self._codes: dict[int, list[_Target]] = {}
        self._alive: list[Any] = []
        self.steps: dict[Path, StepSeconds] = {}
        """Steps by the names of those around them and their own, in the order in which their first calls began."""
        self.drawing: set[Path] = set()
        """Steps that drew random numbers, beside the steps within; (): code outside of all steps."""
        self._open: list[_Open] = []
        self._booked = 0
        self._events = 0
        self._draws = self._compared = draws
        self._met: set[int] = set()
        self.compared_s: float = 0.0
        """Seconds that comparing generators has taken so far."""
        for function, named in () if draws is None else draws.functions:
            self._add_code(function, "", named=named)
        self._hook = self._make_hook()

    # -- steps -------------------------------------------------------------------------------------------------------

    def add(self, step: Any, label: str) -> None:
        """Time the calls of ``step``, if they cause events."""
        bound: tuple[Any, ...] = ()
        named: dict[str, Any] = {}
        while isinstance(step, functools.partial):
            bound, named, step = (*step.args, *bound), {**step.keywords, **named}, step.func
        if isinstance(step, types.MethodType):
            self._add_code(step.__func__, label, (step.__self__, *bound), named)
        elif isinstance(step, types.FunctionType):
            self._add_code(step, label, bound, named)
        elif not isinstance(step, types.BuiltinFunctionType):
            self._add_code(_method(step, "__call__"), label, (step, *bound), named)

    def add_method(self, owner: Any, name: str, label: str) -> None:
        """Time the calls of that method of ``owner``, as its class defines it."""
        self._add_code(_method(owner, name), label, (owner,))

    def _add_code(
        self, function: Any, label: str, bound: tuple[Any, ...] = (), named: dict[str, Any] | None = None
    ) -> None:
        if not isinstance(function, types.FunctionType):
            return
        target = _Target(label, function, bound, named)
        self._alive += (function, target)
        known = self._codes.setdefault(id(function.__code__), [])
        same = [one for one in known if one.identity == target.identity]
        if not same:
            known.append(target)
            known.sort(key=lambda one: -one.weight)
        elif (same[0].label or "").partition(" #")[0] != label.partition(" #")[0]:
            same[0].label = None

    # -- one batch ---------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Begin; False, and nothing is timed, if the thread has a profile function already."""
        if sys.getprofile() is not None:
            return False
        sys.setprofile(self._hook)
        return True

    def stop(self) -> None:
        """Stop, and release the steps. A profile function of other code stays. Idempotent."""
        if sys.getprofile() is self._hook:
            sys.setprofile(None)
        else:
            self.is_whole = False
        self.is_whole &= not self._open
        self._open.clear()
        self._codes.clear()
        self._alive.clear()
        self._draws = self._compared = None

    @property
    def cost_s(self) -> float:
        """Seconds that timing has taken so far."""
        return self._events * self._costs.event_s + self._booked * self._costs.booking_s + self.compared_s

    def call(self, label: str, function: Callable[..., Any], *args: Any) -> Any:
        """Call ``function`` as a step of that name and return its result."""
        key = object()
        if not self.drawing:  # then what follows the first sample may have drawn
            self._compared = self._draws
        self._enter(key, label)
        try:
            return function(*args)
        finally:
            if self._open and self._open[-1].key is key:
                self._leave()

    def _make_hook(self) -> Callable[[types.FrameType, str, Any], None]:
        codes, opened, entropy = self._codes, self._open, os.urandom

        def hook(frame: types.FrameType, event: str, arg: Any) -> None:
            self._events += 1
            if event == "call":
                targets = codes.get(id(frame.f_code))
                if targets is not None:
                    self._called(frame, targets)
                if self._compared is not None:
                    self._meet(self._compared, frame)
            elif event == "return" and opened and opened[-1].key is frame:
                self._leave()
            elif event == "c_call" and arg is entropy:
                self.drawing.add(self._path)

        return hook

    def _called(self, frame: types.FrameType, targets: list[_Target]) -> None:
        target = next((one for one in targets if one.matches(frame)), None)
        if target is not None and target.label:
            self._enter(frame, target.label)
        elif target is not None and target.label is not None:
            self.drawing.add(self._path)
        if self._events > MOST_EVENTS:
            sys.setprofile(None)

    @property
    def _path(self) -> Path:
        return self._open[-1].path if self._open else ()

    def _enter(self, key: Any, label: str) -> None:
        path = (*self._path, label)
        self._compare()
        if path in self.steps and len(path) == 1:  # the second sample has begun
            self._compared = None
        self.steps.setdefault(path, (0, 0.0, 0.0))
        self._open.append(_Open(key, path, self._wall(), self._cpu(), self.cost_s))

    def _leave(self) -> None:
        cpu, wall = self._cpu(), self._wall()
        self._compare()
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

    # -- random numbers ----------------------------------------------------------------------------------------------

    def _compare(self) -> None:
        """Note that the code that runs has drawn, if a generator has moved since the last comparison."""
        if self._compared is not None:
            began = self._wall()
            if self._compared.moved():
                self.drawing.add(self._path)
            self.compared_s += self._wall() - began

    def _meet(self, draws: WatchedGenerators, frame: types.FrameType) -> None:
        code = frame.f_code
        if id(code) not in self._met:
            began = self._wall()
            self._met.add(id(code))
            self._alive.append(code)
            draws.meet(code.co_names, frame.f_globals)
            self.compared_s += self._wall() - began


def _method(owner: Any, name: str) -> Any:
    return inspect.getattr_static(type(owner), name, None)


# -- what it costs -----------------------------------------------------------------------------------------------------


def _calls(function: Callable[[], Any]) -> None:
    for _ in range(_CALLS_TRIED):
        function()


def _fastest_s(function: Callable[[], Any]) -> float:
    def once() -> float:
        began = monotonic()
        _calls(function)
        return monotonic() - began

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
