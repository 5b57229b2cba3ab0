"""Several trainings on one cluster: how long each of them waits, second by second.

The first one has the cluster to itself, then the others join at once, and in the end they are ended, so that it has
everything again. All are alike, and want more workers than there are. Each course is on a cluster of its own: a node
for the trainings, without place for workers, and one with `ROOM` places.
"""

import json
import math
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.cluster import two_raylets
from benchmarks.process import MeasurementError, Surroundings
from benchmarks.svg import STYLE, Panel, Series, Stretch, chart

COUNTS = (2, 4)
ROOM = 12
"""As many can be shared equally by two and by four."""
NAP_S = 0.05
FIRST_LINE_S = 120.0
PAUSE_S = 0.1
ALIKE = 0.1
"""Shares of time that are less than that apart are equal."""
SETTLED_S = 3
"""Seconds in a row that they must be."""
COLOURS = ("#4a5a8f", "#c26a3d", "#3d8f6a", "#8f3d7c")


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds from the first line of the first training: when the others start, when they are ended, and the end."""

    join_s: float = 20.0
    leave_s: float = 65.0
    end_s: float = 80.0


QUICK = Times(join_s=8.0, leave_s=25.0, end_s=30.0)
START_S = 20.0
"""What starting and ending a cluster and the first training takes, for the estimate alone."""
Line = Mapping[str, float]


class Training:
    """A process that trains; `lines` is what it has printed, parsed."""

    def __init__(self, address: str, nap_s: float) -> None:
        where = Surroundings()
        command = [where.python, "-m", "benchmarks.remote.training", address, str(nap_s)]
        self.process = subprocess.Popen(
            command, cwd=where.folder, env=where.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[dict[str, float]] = []
        self.errors = ""
        threading.Thread(target=self._read, daemon=True, name="lines of a training").start()
        threading.Thread(target=self._read_errors, daemon=True, name="errors of a training").start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def kill(self) -> None:
        """As a scheduler or a lack of memory would."""
        self.process.kill()
        self.process.wait()


@contextmanager
def _training(address: str) -> Iterator[Training]:
    training = Training(address, NAP_S)
    try:
        yield training
    finally:
        training.kill()


def measure(count: int, times: Times) -> dict[str, Any]:
    """The course of so many trainings: the seconds of each line are from the first line of the first one."""
    others: list[Training] = []
    with two_raylets(ROOM) as address, _training(address) as first:
        try:
            zero = _first_line(first)
            _wait(zero + times.join_s, first)
            others += [Training(address, NAP_S) for _ in range(count - 1)]
            _wait(zero + times.leave_s, first, *others)
        finally:
            for training in others:
                training.kill()
        _wait(zero + times.end_s, first)
        courses = [[{**line, "at": line["at"] - zero} for line in training.lines] for training in (first, *others)]
    return {"join_s": times.join_s, "leave_s": times.leave_s, "trainings": courses}


def _first_line(training: Training) -> float:
    """When it came. Raises MeasurementError."""
    until_s = time.monotonic() + FIRST_LINE_S
    while not training.lines:
        if time.monotonic() > until_s:
            raise MeasurementError(f"no batch after {FIRST_LINE_S:g} s")
        _wait(time.time() + PAUSE_S, training)
    return training.lines[0]["at"]


def _wait(until: float, *trainings: Training) -> None:
    """Wait for that moment, as `time.time` has it. Raises MeasurementError if a training ends."""
    while (left_s := until - time.time()) > 0:
        for training in trainings:
            if training.process.poll() is not None:
                raise MeasurementError(f"a training ended: {training.errors}")
        time.sleep(min(PAUSE_S, left_s))


# -- what it comes to --------------------------------------------------------------------------------------------------


def by_stretch(lines: Sequence[Line], stretch_s: int = 1) -> dict[int, tuple[float, float]]:
    """The share of time waited, and the workers at its end, of each stretch by its number."""
    found: dict[int, list[Line]] = defaultdict(list)
    for line in lines:
        found[max(0, math.floor(line["at"] / stretch_s))].append(line)
    return {number: (_waited(those), those[-1]["workers"]) for number, those in found.items()}


def _waited(lines: Sequence[Line]) -> float:
    return sum(line["wait"] * line["seconds"] for line in lines) / sum(line["seconds"] for line in lines)


def equal_after_s(course: Mapping[str, Any]) -> float | None:
    """Seconds from the first batch of the last that joined until all wait equally long; None if that never came."""
    joined_s = max(lines[0]["at"] for lines in course["trainings"] if lines)
    each = [by_stretch(lines) for lines in course["trainings"]]
    seconds = range(math.floor(joined_s), math.floor(course["leave_s"]) - SETTLED_S + 1)
    equal = (second for second in seconds if all(_are_equal(each, second + later) for later in range(SETTLED_S)))
    found = next(equal, None)
    return None if found is None else max(0.0, found - joined_s)


def _are_equal(each: Sequence[Mapping[int, tuple[float, float]]], second: int) -> bool:
    waits = [one[second][0] for one in each if second in one]
    return len(waits) == len(each) and max(waits) - min(waits) <= ALIKE


def drawn(course: Mapping[str, Any]) -> str:
    """The course as SVG: each training's share of time waited, and its workers."""
    each = [by_stretch(lines) for lines in course["trainings"]]
    seconds = sorted({second for one in each for second in one})
    stretches = [Stretch(start_s=second, end_s=second + 1) for second in seconds]

    def series(part: int) -> list[Series]:
        return [
            Series(name=f"training {number + 1}", colour=colour, values=[one.get(s, (0.0, 0.0))[part] for s in seconds])
            for number, (one, colour) in enumerate(zip(each, COLOURS, strict=False))
        ]

    panels = [
        Panel(title="share of the time waited", series=series(0), shown="{:.0%}".format),
        Panel(title="remote workers", series=series(1), least_top=ROOM),
    ]
    svg = chart(stretches, panels, [], label=f"{len(each)} trainings on one cluster")
    opened, rest = svg.split(">", 1)
    return f'{opened} xmlns="http://www.w3.org/2000/svg"><style>{STYLE}</style>{rest}\n'


def main(arguments: Sequence[str]) -> None:
    """Print the course of so many trainings, with these times."""
    request = json.loads(arguments[0])
    print(json.dumps(measure(request["count"], Times(**request["times"]))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
