"""Record the calls of a thread as a tree, by a profile function (``sys.setprofile``). The called code is unchanged.

A node stands for the calls of one function, of Python or of C, from one instruction below the same parent. A method has
a node for each class of its objects. Code of dpex and asyncio is hidden: its calls and its time count for its caller.

The time of a node excludes the nodes below it. So a tree is correct even if the recording ends early. The profile
function reads the clock first and last, so its own time is in no node. The interpreter's cost of calling it is
subtracted. The CPU clock is read only after `LONG_S` without an event. Shorter times count as computing. New nodes and
generator comparisons slow down the first sample, so the mean of the other samples replaces it, if there are any.

A coroutine that awaits runs no code. So the time in which the event loop is idle is divided among the awaits, by the
seconds for which each was pending. A `CallRecorder` belongs to one thread and one batch.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import selectors
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cache
from math import inf
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

from dpex.profile.call_names import label_of_c, label_of_code
from dpex.system.clock import monotonic

MOST_EVENTS = 200_000  # a recording ends after this many, which take 0.1 to 0.2 s
MOST_NODES, MOST_DEPTH = 1000, 150  # limits of a tree; further calls count for their callers
MOST_COMPARISONS, DEEPEST_COMPARISON = 200, 6  # limits of comparisons, each up to 50 µs; deeper draws count for callers
LONG_S = 50e-6
_DPEX = Path(__file__).parents[1]
_HIDDEN = (f"{_DPEX}{os.sep}", f"{Path(asyncio.__file__).parent}{os.sep}", selectors.__file__)
_DEMO = f"{_DPEX / 'cli'}{os.sep}"  # not hidden, because it has the dataset of the demonstration
_PLAIN, _METHOD, _COROUTINE = 1, 2, 4  # kinds of code, as bits; 0: it is hidden
_ASYNC = inspect.CO_COROUTINE | inspect.CO_ITERABLE_COROUTINE
Draws = Callable[[FrameType | None, bool], bool]
"""`dpex.worker.draws.GeneratorDraws`. Arguments: the call that begins, or None; whether generators are compared."""
_CALLS_TRIED, _ROUNDS_TRIED = 64, 5
_TIMES_SEEN = 2.5  # the whole cost of an event, divided by its cost in the recorded times


@dataclass(eq=False, slots=True)
class CallNode:
    """The calls of one function from one place, which is the ``site``: a file and a line, or ("", 0) in hidden code."""

    label: str
    depth: int = 0
    site: Any = ("", 0)
    code: CodeType | None = None
    """The code of the function; None: a function of C, an await, or a root."""
    children: dict[Any, CallNode] = field(default_factory=dict)
    calls: int = 0
    hidden: int = 0
    """Number of calls and returns of hidden code. The time of this code is in ``wall_s``."""
    wall_s: float = 0.0
    wait_s: float = 0.0
    """The part of ``wall_s`` in which the thread had no CPU. Both exclude the nodes below."""
    awaited_s: float = 0.0
    """Seconds for which awaits at this place were pending."""
    draws: bool = False

    def below(self) -> Iterator[CallNode]:
        """Yield this node and all nodes below it."""
        yield self
        for child in self.children.values():
            yield from child.below()


class CallRecorder:
    """Records the calls of a batch; see the module. For each root, call `start` once, and always `stop` after it.

    Args:
        draws: Finds draws of random numbers in the first sample; None: they are not looked for.
        wall, cpu: The clocks of the thread, in seconds.
        event_s: The cost of an event in seconds, as `cost_of_event` measures it; None: measured.
    """

    def __init__(
        self,
        draws: Draws | None = None,
        wall: Callable[[], float] = monotonic,
        cpu: Callable[[], float] = time.thread_time,
        event_s: float | None = None,
    ) -> None:
        self._draws, self._wall, self._cpu = draws, wall, cpu
        self._event_s = cost_of_event() if event_s is None else event_s
        self.is_whole: bool = True
        """False if other code has set a profile function."""
        self.cost_s: float = 0.0
        """Seconds that recording has taken so far."""
        self._root, self._has_ended, self._samples = CallNode(""), True, 0
        self._first: list[tuple[CallNode, float, float]] = []
        self._hook: Any = None
        self._began_s = self._idle_s = 0.0
        self._nodes = self._comparisons = 0
        self._kinds: dict[int, int] = {}
        self._alive: list[CodeType] = []  # keeps the ids in `_kinds` from being reused
        self._pending: dict[int, tuple[CallNode, float]] = {}
        self._awaited: Any = None

    def start(self, root: CallNode, budget_s: float = inf) -> bool:
        """Record calls below ``root``, until the samples after the first have cost ``budget_s`` seconds to record.
        Return False, and record nothing, if the thread already has a profile function."""
        if sys.getprofile() is not None:
            self.is_whole = False
            return False
        self._root, self._has_ended, self._samples, self._first = root, False, 0, []
        if self._draws is not None:
            self._draws(None, True)
        self._hook = self._hook_for(root, budget_s / max(1e-9, _TIMES_SEEN * self._event_s))
        self._idle_s = self._wall() - self._cpu()
        self._began_s = self._wall()
        sys.setprofile(self._hook)
        return True

    def stop(self) -> None:
        """End the recording. A profile function of other code stays. Idempotent."""
        if self._hook is not None and sys.getprofile() is self._hook:
            self._stop_recording()
        self.is_whole &= self._has_ended
        draws, self._draws, self._hook, self._awaited = self._draws, None, None, None
        if draws is not None and not any(node.draws for node in self._root.below()):
            self._root.draws = draws(None, True)  # True if a sample after the first drew
        self._pending.clear()

    def _stop_recording(self) -> None:
        """Remove the profile function, subtract its cost, and divide the root's wait among the awaits."""
        sys.setprofile(None)
        now, self._has_ended, root = self._wall(), True, self._root
        for node, since in self._pending.values():
            node.awaited_s += now - since
        nodes = self._net_times()
        self.cost_s += max(0.0, now - self._began_s - sum(wall_s for _, wall_s, _ in nodes))
        first = {node: seconds for node, *seconds in self._first} if self._samples > 1 else {}
        scale = self._samples / (self._samples - 1) if first else 1.0
        for node, wall_s, wait_s in nodes:
            first_s, first_wait_s = first.get(node, (0.0, 0.0))
            node.wall_s = scale * max(0.0, wall_s - first_s)
            node.wait_s = min(node.wall_s, scale * (wait_s - first_wait_s))
        if awaited_s := sum(node.awaited_s for node, *_ in nodes):
            for node, *_ in nodes:
                node.wall_s += (waited_s := root.wait_s * node.awaited_s / awaited_s)
                node.wait_s += waited_s if node is not root else 0.0
            root.wall_s, root.wait_s = root.wall_s - root.wait_s, 0.0

    def _hook_for(self, root: CallNode, most_events: float) -> Any:  # noqa: C901
        """Return the profile function. It calls no other function of Python, which would take a third of its time."""
        clock, kinds, long_s = self._wall, self._kinds, LONG_S
        calls: list[tuple[Any, CallNode, bool]] = []  # (frame, or code that calls C; caller's node; is caller hidden)
        node, is_hidden, is_comparing = root, True, self._draws is not None
        events, last = 0, 0.0

        def hook(frame: FrameType, event: str, arg: Any) -> None:  # noqa: C901
            nonlocal node, is_hidden, events, last, is_comparing, most_events
            lap_s = clock() - (last or self._began_s)
            node.wall_s += lap_s
            events += 1
            if lap_s > long_s:
                self._add_off_cpu(node, lap_s)
            if event == "c_call":
                calls.append((frame.f_code, node, is_hidden))
                if is_hidden:
                    node.hidden += 2
                else:
                    if is_comparing:
                        self._note_draws(node)
                    node = node.children.get((arg.__name__, frame.f_lasti)) or self._c_child(node, frame, arg)
                    node.calls += 1
            elif event == "call":
                kind = kinds.get(id(frame.f_code))
                if kind is None:
                    kind = self._kind_of_new_code(frame)
                if is_comparing and (kind or node is not root):
                    self._note_draws(node, frame)
                calls.append((frame, node, is_hidden))
                is_hidden = not kind
                if kind:
                    node = self._child(node, frame, kind)
                    node.calls += 1
                else:
                    node.hidden += 2
            elif calls and calls[-1][0] is (frame if event == "return" else frame.f_code):
                if is_comparing and not is_hidden:
                    self._note_draws(node)
                if arg is not None and event == "return" and frame.f_code.co_flags & _ASYNC and not is_hidden:
                    self._suspend(node, frame, arg)
                is_sample, (_, node, is_hidden) = not is_hidden, calls.pop()
                if is_sample and node is root:
                    is_comparing = False
                    self._samples += 1
                    if self._samples == 1:
                        self._first, most_events = self._net_times(), most_events + events
                    elif events > most_events:
                        self._stop_recording()
            elif event == "return":  # its call began before the recording, or contains a call whose end is missing
                known = next((at for at, call in enumerate(calls) if call[0] is frame), None)
                if known is not None:
                    _, node, is_hidden = calls[known]
                    del calls[known:]
            if events > MOST_EVENTS:
                self._stop_recording()
            last = clock()

        return hook

    def _net_times(self) -> list[tuple[CallNode, float, float]]:
        """Return all nodes with their seconds so far, the cost of events excluded, and the part without a CPU."""
        nodes = list(self._root.below())
        events = (one.calls + one.hidden + sum(child.calls for child in one.children.values()) for one in nodes)
        walls_s = (max(0.0, one.wall_s - count * self._event_s) for one, count in zip(nodes, events, strict=True))
        return [(one, wall_s, one.wait_s) for one, wall_s in zip(nodes, walls_s, strict=True)]

    def _add_off_cpu(self, node: CallNode, lap_s: float) -> None:
        """Count the part of ``lap_s`` seconds in which the thread had no CPU."""
        before_s, self._idle_s = self._idle_s, self._wall() - self._cpu()
        node.wait_s += min(lap_s, max(0.0, self._idle_s - before_s))

    def _note_draws(self, node: CallNode, begins: FrameType | None = None) -> None:
        """Set ``node.draws`` if ``node`` has drawn random numbers. ``begins``: the call in ``node`` that begins now."""
        compares = node.depth <= DEEPEST_COMPARISON and self._comparisons < MOST_COMPARISONS
        self._comparisons += compares
        node.draws |= self._draws is not None and self._draws(begins, compares)

    def _kind_of_new_code(self, frame: FrameType) -> int:
        """Return the kind of a code that is met for the first time."""
        code, kind = frame.f_code, 0
        if not code.co_filename.startswith(_HIDDEN) or code.co_filename.startswith(_DEMO):
            is_method = code.co_argcount > 0 and code.co_varnames[0] == "self"
            kind = _PLAIN | _METHOD * is_method | _COROUTINE * bool(code.co_flags & _ASYNC)
        self._kinds[id(code)] = kind
        self._alive.append(code)
        return kind

    def _child(self, node: CallNode, frame: FrameType, kind: int) -> CallNode:
        """Return the node of a Python call that begins, or of a coroutine or generator that resumes."""
        code, caller = frame.f_code, frame.f_back
        owner = type(frame.f_locals.get("self")) if kind & _METHOD else None
        key = id(code), caller.f_lasti if caller is not None else 0, owner
        found = node.children.get(key) or self._new_node(node, key, label_of_code(code, owner), caller, code)
        if kind & _COROUTINE and (awaiting := self._pending.pop(id(frame), None)):
            awaiting[0].awaited_s += self._wall() - awaiting[1]
        return found

    def _c_child(self, node: CallNode, frame: FrameType, function: Any) -> CallNode:
        node.draws |= function is os.urandom
        return self._new_node(node, (function.__name__, frame.f_lasti), label_of_c(function), frame)

    def _new_node(self, node: CallNode, key: Any, label: str, caller: Any, code: CodeType | None = None) -> CallNode:
        """Return a new node below ``node``, or ``node`` at a limit. ``caller``: the calling frame, or None."""
        if self._nodes >= MOST_NODES or node.depth >= MOST_DEPTH:
            return node
        self._nodes += 1
        is_shown = caller is not None and (self._kinds.get(id(caller.f_code)) or self._kind_of_new_code(caller))
        site = (caller.f_code.co_filename, caller.f_lineno or 0) if caller is not None and is_shown else ("", 0)
        found = node.children[key] = CallNode(label, node.depth + 1, site, code)
        return found

    def _suspend(self, node: CallNode, frame: FrameType, arg: Any) -> None:
        """If ``arg`` is a future, note that a coroutine awaits it. Of nested coroutines, only the innermost counts."""
        if arg is not self._awaited and hasattr(arg, "_asyncio_future_blocking"):
            self._awaited, key = arg, ("await", frame.f_lasti)
            awaiting = node.children.get(key) or self._new_node(node, key, "await", frame)
            self._pending[id(frame)] = awaiting, self._wall()


@cache
def cost_of_event() -> float:
    """Measure the cost of an event that the recording sees, in seconds. The thread must have no profile function."""

    def work(a: int = 1, b: int = 2, c: int = 3, d: int = 4, e: int = 5, f: int = 6) -> int:
        return (a + b) * c - d if a < e and b < f else f  # Python 3.11 runs slower under a profile function

    def round_s(*, is_recorded: bool) -> float:
        root, recorder, began = CallNode(""), CallRecorder(event_s=0.0), monotonic()
        is_recorded = is_recorded and recorder.start(root)
        for _ in range(_CALLS_TRIED):
            work()
        took_s = monotonic() - began
        recorder.stop()
        return root.wall_s if is_recorded else took_s

    plain_s, told_s = (min(round_s(is_recorded=each) for _ in range(_ROUNDS_TRIED)) for each in (False, True))
    return max(0.0, told_s - plain_s) / (2 * _CALLS_TRIED)
