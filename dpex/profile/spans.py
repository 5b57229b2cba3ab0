"""Wall and CPU time of nested steps, and the slowest samples. Standard library only; clocks are given.

Each thread books into a tree of its own, so that no step takes a lock. A `Book` may be pickled: what comes out is empty
and keeps the clocks. `Spans` are values, which may be sent and added up.
"""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

Clock = Callable[[], float]
SLOWEST = 10
_KEPT = 4096
"""Samples whose times are kept, evenly over all."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step, by the names on the way to it from the outermost one; seconds are sums over ``calls``.

    own_wall_s, own_cpu_s: without the steps within.
    """

    path: tuple[str, ...]
    calls: int
    wall_s: float
    cpu_s: float
    own_wall_s: float
    own_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class SlowSample:
    """A sample and how long it took: ``index`` is what the loader asked the dataset for."""

    index: Any
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, kw_only=True)
class Spans:
    """What was booked: steps in the order of their first call, each before those within; the slowest samples first.

    samples: how many were made. sample_walls_s: of a fair choice of at most a few thousand, in order.
    """

    samples: int = 0
    steps: tuple[Step, ...] = ()
    slowest: tuple[SlowSample, ...] = ()
    sample_walls_s: tuple[float, ...] = ()


def add_up(parts: Iterable[Spans]) -> Spans:
    """Of several threads or workers, all together."""
    parts = list(parts)
    steps: dict[tuple[str, ...], Step] = {}
    for part in parts:
        for step in part.steps:
            known = steps.get(step.path)
            steps[step.path] = step if known is None else _sum(known, step)
    order = {path: number for number, path in enumerate(steps)}
    tree = sorted(steps.values(), key=lambda step: _place(step.path, order))
    slowest = sorted((slow for part in parts for slow in part.slowest), key=lambda slow: -slow.wall_s)
    return Spans(
        samples=sum(part.samples for part in parts),
        steps=tuple(tree),
        slowest=tuple(slowest[:SLOWEST]),
        sample_walls_s=tuple(wall_s for part in parts for wall_s in part.sample_walls_s),
    )


def _place(path: tuple[str, ...], order: dict[tuple[str, ...], int]) -> list[int]:
    return [order[path[:depth]] for depth in range(1, len(path) + 1)]


def _sum(one: Step, other: Step) -> Step:
    return Step(
        path=one.path,
        calls=one.calls + other.calls,
        wall_s=one.wall_s + other.wall_s,
        cpu_s=one.cpu_s + other.cpu_s,
        own_wall_s=one.own_wall_s + other.own_wall_s,
        own_cpu_s=one.own_cpu_s + other.own_cpu_s,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The least of the values that ``share`` (0 to 1) of them do not exceed; 0.0 if there are none."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)] if ordered else 0.0


class Node:
    """A step at its place in the tree."""

    __slots__ = ("calls", "children", "cpu_s", "wall_s")

    def __init__(self) -> None:
        self.calls = 0
        self.wall_s = 0.0
        self.cpu_s = 0.0
        self.children: dict[str, Node] = {}

    def steps(self, path: tuple[str, ...] = ()) -> Iterator[Step]:
        """Those below, in order."""
        for name, node in list(self.children.items()):
            within = list(node.children.values())
            yield Step(
                path=(*path, name),
                calls=node.calls,
                wall_s=node.wall_s,
                cpu_s=node.cpu_s,
                own_wall_s=max(0.0, node.wall_s - sum(child.wall_s for child in within)),
                own_cpu_s=max(0.0, node.cpu_s - sum(child.cpu_s for child in within)),
            )
            yield from node.steps((*path, name))


class _Thread:
    """What one thread booked. at: the step it is in. indices: of the samples of a batch that it is making."""

    def __init__(self) -> None:
        self.root = self.at = Node()
        self.in_sample = False
        self.indices: Iterator[Any] | None = None
        self.samples = 0
        self.slowest: list[tuple[float, int, float, Any]] = []
        self.walls_s: list[float] = []
        self.stride = 1

    def sample(self, index: Any, wall_s: float, cpu_s: float) -> None:
        if self.samples % self.stride == 0:
            self.walls_s.append(wall_s)
            if len(self.walls_s) >= 2 * _KEPT:
                self.walls_s = self.walls_s[::2]
                self.stride *= 2
        self.samples += 1
        if len(self.slowest) < SLOWEST:
            heapq.heappush(self.slowest, (wall_s, self.samples, cpu_s, index))
        elif wall_s > self.slowest[0][0]:
            heapq.heapreplace(self.slowest, (wall_s, self.samples, cpu_s, index))

    def spans(self) -> Spans:
        slowest = [SlowSample(index=i, wall_s=wall_s, cpu_s=cpu_s) for wall_s, _, cpu_s, i in sorted(self.slowest)]
        return Spans(
            samples=self.samples,
            steps=tuple(self.root.steps()),
            slowest=tuple(reversed(slowest)),
            sample_walls_s=tuple(self.walls_s),
        )


class Book:
    """Books steps; `call`, `sample` and `batch` may be used from any thread. Some 2 microseconds a step."""

    def __init__(self, wall: Clock = time.perf_counter, cpu: Clock = time.thread_time) -> None:
        self._wall = wall
        self._cpu = cpu
        self._local = threading.local()
        self._threads: list[_Thread] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Book, (self._wall, self._cpu)

    def spans(self) -> Spans:
        """What was booked so far, of all threads."""
        return add_up(thread.spans() for thread in list(self._threads))

    def call(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The function's result; a step of that name, within the one that the thread is in."""
        return self._timed(self._thread(), name, function, args, kwargs)[0]

    def sample(self, name: str, function: Callable[[Any], Any], index: Any) -> Any:
        """The same for a dataset's answer to an index: the outermost of nested ones is a sample."""
        thread = self._thread()
        if thread.in_sample:
            return self._timed(thread, name, function, (index,), {})[0]
        thread.in_sample = True
        try:
            made, wall_s, cpu_s = self._timed(thread, name, function, (index,), {})
        finally:
            thread.in_sample = False
        thread.sample(index if thread.indices is None else next(thread.indices, index), wall_s, cpu_s)
        return made

    def batch(self, name: str, function: Callable[[Any], Any], indices: Any) -> Any:
        """The same for a dataset's answer to a list of indices.

        Samples are told apart where it makes them one by one; else each counts as an equal part of the batch.
        """
        thread = self._thread()
        if thread.in_sample or thread.indices is not None:
            return self._timed(thread, name, function, (indices,), {})[0]
        before, thread.indices = thread.samples, iter(list(indices))
        try:
            made, wall_s, cpu_s = self._timed(thread, name, function, (indices,), {})
        finally:
            thread.indices = None
        if thread.samples == before:
            for index in indices:
                thread.sample(index, wall_s / len(indices), cpu_s / len(indices))
        return made

    def _thread(self) -> _Thread:
        thread: _Thread | None = getattr(self._local, "thread", None)
        if thread is None:
            thread = self._local.thread = _Thread()
            self._threads.append(thread)
        return thread

    def _timed(
        self, thread: _Thread, name: str, function: Callable[..., Any], args: Any, kwargs: Any
    ) -> tuple[Any, float, float]:
        here = thread.at
        node = here.children.get(name)
        if node is None:
            node = here.children[name] = Node()
        thread.at = node
        cpu_began, began = self._cpu(), self._wall()
        try:
            made = function(*args, **kwargs)
        finally:
            wall_s, cpu_s = self._wall() - began, self._cpu() - cpu_began
            thread.at = here
            node.calls += 1
            node.wall_s += wall_s
            node.cpu_s += cpu_s
        return made, wall_s, cpu_s
