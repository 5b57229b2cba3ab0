"""Times known steps where they are called, for one batch, without changing any of them.

While a batch is made, the thread has a profile function (``sys.setprofile``), which hears of each call in it. A step is
known by the code that runs when it is called, and by the object that it is called on. So nothing of the dataset is
replaced or patched: whoever looks at a transform, its class or its attributes finds what was there.

What is not Python code when it is called (a ``functools.partial`` of a built-in function, a ufunc) is not told of and
not timed. Of functions with the same code those with the same closure count as one.

`StepWatch` belongs to one thread and one batch.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
import time
import types
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

from dpex.profile.spans import Node, ProfiledStep

MOST_EVENTS = 200_000
"""A batch of which more is told is left alone from then on: that is some 0.1 s which it takes longer."""
_CALLS_TRIED = 64
"""Calls by which the cost of timing is found, in one round: enough for the clock to tell."""
_ROUNDS_TRIED = 5
"""The fastest of so many rounds is the cost, as other programs only ever make one slower."""
_mine = threading.local()


class Costs(NamedTuple):
    """What being told of an event takes, and what booking a call takes beside, s."""

    event_s: float
    booking_s: float


class _Target(NamedTuple):
    """What a frame of some code must have, and what the step is called. ``owner``: the object it is called on.

    closure: otherwise, values by name.
    """

    label: str
    owner: Any = None
    is_method: bool = False
    closure: tuple[tuple[str, Any], ...] = ()

    def matches(self, frame: types.FrameType) -> bool:
        if not self.is_method:
            there = frame.f_locals if self.closure else {}
            return all(there.get(name) is value for name, value in self.closure)
        return _first_argument(frame) is self.owner


class _Open(NamedTuple):
    """A call under way: its frame or built-in function, its name, the step around it, and when it began, by all there
    is.
    """

    key: Any
    label: str
    around: Node
    wall: float
    cpu: float
    cost_s: float


class StepWatch:
    """See the module: `add` steps, `start`, and in any case `stop`, or `pause` where it is to start again.

    Args:
        costs: What being told takes; None for what it takes on this machine.
        cpu: The CPU clock that steps are timed by.
        wall: The other clock.
        most_events: Events after which nothing is told any more; None for `MOST_EVENTS`.
    """

    def __init__(
        self,
        costs: Costs | None = None,
        cpu: Callable[[], float] = time.thread_time,
        wall: Callable[[], float] = time.perf_counter,
        most_events: float | None = None,
    ) -> None:
        self._cpu = cpu
        self._wall = wall
        self._most_events = MOST_EVENTS if most_events is None else most_events
        self._costs = costs or costs_here()
        self.is_whole = True
        """Whether all calls were told of, as far as is known."""
        self._codes: dict[int, list[_Target]] = {}
        self._builtins: dict[int, str] = {}
        self._alive: list[Any] = []
        self._root = self._at = Node()
        self._open: list[_Open] = []
        self._booked = 0
        self._events = 0
        self._hook = self._make_hook()

    # -- what is known -----------------------------------------------------------------------------------------------

    def add(self, step: Any, label: str) -> None:
        """Time calls of this, if they can be told."""
        while isinstance(step, functools.partial):
            step = step.func
        if isinstance(step, types.BuiltinFunctionType):
            self._alive.append(step)
            self._builtins.setdefault(id(step), label)
        elif isinstance(step, types.MethodType):
            self._add_code(step.__func__, _Target(label, step.__self__, is_method=True))
        elif isinstance(step, types.FunctionType):
            self._add_code(step, _Target(label, closure=_closure(step)))
        else:
            self.add_method(step, "__call__", label)

    def add_method(self, owner: Any, name: str, label: str) -> None:
        """Time calls of that method on this object, as its class has it."""
        self._add_code(inspect.getattr_static(type(owner), name, None), _Target(label, owner, is_method=True))

    def _add_code(self, function: Any, target: _Target) -> None:
        if isinstance(function, types.FunctionType):
            code = function.__code__
            self._alive += (code, target.owner)
            self._codes.setdefault(id(code), []).append(target)

    # -- one batch ---------------------------------------------------------------------------------------------------

    def start(self) -> bool:
        """Whether calls are told of from now on: not where the thread has a profile function already."""
        if sys.getprofile() is not None:
            return False
        _prepare_for_forks()
        _mine.hook = self._hook
        sys.setprofile(self._hook)
        return True

    def pause(self) -> None:
        """No more for now. A profile function that somebody else has set meanwhile stays; idempotent."""
        if sys.getprofile() is self._hook:
            sys.setprofile(None)
        else:
            self.is_whole = False
        self.is_whole &= not self._open
        _mine.hook = None
        self._open.clear()
        self._at = self._root

    def stop(self) -> None:
        """No more, and the steps are let go; idempotent."""
        self.pause()
        self._codes.clear()
        self._builtins.clear()
        self._alive.clear()

    @property
    def cost_s(self) -> float:
        """What being told has taken so far."""
        return self._events * self._costs.event_s + self._booked * self._costs.booking_s

    @property
    def steps(self) -> tuple[ProfiledStep, ...]:
        """What was booked."""
        return tuple(self._root.steps())

    def call(self, label: str, function: Callable[..., Any], *args: Any) -> Any:
        """The function's result, booked by that name, with the steps within."""
        key = object()
        self._enter(key, label)
        try:
            return function(*args)
        finally:
            if self._open and self._open[-1].key is key:
                self._leave()

    def book_nothing(self) -> None:
        """Some calls that take no time; to be timed."""
        for _ in range(_CALLS_TRIED):
            self._enter(None, "nothing")
            self._leave()

    def _make_hook(self) -> Callable[[types.FrameType, str, Any], None]:
        codes, builtins, opened = self._codes, self._builtins, self._open

        def hook(frame: types.FrameType, event: str, arg: Any) -> None:
            self._events += 1
            if event == "call":
                targets = codes.get(id(frame.f_code))
                if targets is not None:
                    self._called(frame, targets)
            elif event == "return":
                if opened and opened[-1].key is frame:
                    self._leave()
            elif builtins:
                if event != "c_call":
                    if opened and opened[-1].key is arg:
                        self._leave()
                elif id(arg) in builtins:
                    self._enter(arg, builtins[id(arg)])

        return hook

    def _called(self, frame: types.FrameType, targets: list[_Target]) -> None:
        for target in targets:
            if target.matches(frame):
                self._enter(frame, target.label)
                break
        if self._events > self._most_events:
            sys.setprofile(None)

    def _enter(self, key: Any, label: str) -> None:
        around = self._at
        node = around.children.get(label)
        if node is None:
            node = around.children[label] = Node()
        self._at = node
        self._open.append(_Open(key, label, around, self._wall(), self._cpu(), self.cost_s))

    def _leave(self) -> None:
        cpu, wall = self._cpu(), self._wall()
        call, node = self._open.pop(), self._at
        cost_s = self.cost_s - call.cost_s
        wall_s, cpu_s = max(0.0, wall - call.wall - cost_s), max(0.0, cpu - call.cpu - cost_s)
        node.calls += 1
        node.wall_s += wall_s
        node.cpu_s += cpu_s
        self._at = call.around
        self._booked += 1
        self._was_booked(call.label, wall_s, cpu_s)

    def _was_booked(self, label: str, wall_s: float, cpu_s: float) -> None:
        """A call has ended; for those who want to know of each."""


def _first_argument(frame: types.FrameType) -> Any:
    code = frame.f_code
    if code.co_argcount:
        return frame.f_locals.get(code.co_varnames[0])
    if code.co_flags & inspect.CO_VARARGS:
        rest = frame.f_locals.get(code.co_varnames[code.co_kwonlyargcount])
        return rest[0] if rest else None
    return None


def _closure(function: types.FunctionType) -> tuple[tuple[str, Any], ...]:
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that has no value yet: then the code alone must do
        return ()
    return tuple(zip(function.__code__.co_freevars, values, strict=True))


# -- what it costs -----------------------------------------------------------------------------------------------------


def _nothing() -> None:
    pass


def _calls() -> None:
    for _ in range(_CALLS_TRIED):
        _nothing()


def _fastest_s(function: Callable[[], Any]) -> float:
    def once() -> float:
        began = time.perf_counter()
        function()
        return time.perf_counter() - began

    return min(once() for _ in range(_ROUNDS_TRIED))


@cache
def costs_here() -> Costs:
    """Measured; the clocks are system calls, dear in some containers. Not while the thread has a profile function."""
    watch = StepWatch(Costs(0.0, 0.0))
    plain_s = _fastest_s(_calls)
    sys.setprofile(watch._hook)
    try:
        told_s = _fastest_s(_calls)
    finally:
        sys.setprofile(None)
    return Costs(max(0.0, told_s - plain_s) / (2 * _CALLS_TRIED), _fastest_s(watch.book_nothing) / _CALLS_TRIED)


# -- forks -------------------------------------------------------------------------------------------------------------


@cache
def _prepare_for_forks() -> None:
    os.register_at_fork(after_in_child=_stop_in_child)


def _stop_in_child() -> None:
    """In a process that was forked while a batch was timed, which goes on in the parent only."""
    hook, _mine.hook = getattr(_mine, "hook", None), None
    if hook is not None and sys.getprofile() is hook:
        sys.setprofile(None)
