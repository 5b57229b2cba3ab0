"""Wall and CPU time of nested steps, and the slowest samples, as values. PURE."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class ProfiledStep:
    """One step of making a sample, and the time it took.

    Attributes:
        path: The names of the steps on the way to it, from the outermost one.
        calls: The number of calls.
        wall_s: Wall seconds of all calls.
        cpu_s: CPU seconds of all calls.
        own_wall_s: Wall seconds without the steps within.
        own_cpu_s: CPU seconds without the steps within.
    """

    path: tuple[str, ...]
    calls: int
    wall_s: float
    cpu_s: float
    own_wall_s: float
    own_cpu_s: float


@dataclass(frozen=True, kw_only=True)
class SlowSample:
    """A sample and how long it took.

    Attributes:
        index: What the loader asked the dataset for.
        wall_s: Wall seconds.
        cpu_s: CPU seconds.
    """

    index: Any
    wall_s: float
    cpu_s: float

    @property
    def seconds(self) -> float:
        """The wall seconds, by which the slowest are found."""
        return self.wall_s


@dataclass(frozen=True, kw_only=True)
class Spans:
    """What was timed.

    Attributes:
        samples: The number of samples that were made.
        steps: The steps in the order of their first call, each before those within.
        slowest: The slowest samples, the slowest first.
        sample_walls_s: Wall seconds of a fair choice of at most some hundred samples, in no order.
    """

    samples: int = 0
    steps: tuple[ProfiledStep, ...] = ()
    slowest: tuple[SlowSample, ...] = ()
    sample_walls_s: tuple[float, ...] = ()


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

    def steps(self, path: tuple[str, ...] = ()) -> Iterator[ProfiledStep]:
        """Those below, in order."""
        for name, node in list(self.children.items()):
            within = list(node.children.values())
            yield ProfiledStep(
                path=(*path, name),
                calls=node.calls,
                wall_s=node.wall_s,
                cpu_s=node.cpu_s,
                own_wall_s=max(0.0, node.wall_s - sum(child.wall_s for child in within)),
                own_cpu_s=max(0.0, node.cpu_s - sum(child.cpu_s for child in within)),
            )
            yield from node.steps((*path, name))
