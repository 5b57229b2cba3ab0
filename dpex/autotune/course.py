"""The course of a run in a few hundred points, however long it was: what is drawn of it. PURE.

Written by the tuner's thread alone; any thread reads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpex.autotune.types import Sample

MOST_POINTS = 600
"""Of a course: more than a chart has columns to show. Then neighbours are joined, and half of them are left."""


@dataclass(frozen=True, kw_only=True)
class CoursePoint:
    """What happened between ``at - seconds`` and ``at``.

    lost_s: seconds in which the training loop waited for batches or made them. work_s: seconds between two calls of
    ``next()``. local, remote: workers that ran at the end. prefetch: batches drawn and not yet delivered, at most.
    """

    at: float
    seconds: float
    batches: int
    lost_s: float
    work_s: float
    local: int
    remote: int
    prefetch: int

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds > 0 else 0.0

    @property
    def wait_ratio(self) -> float:
        """The share of the training loop's time that was lost to loading, from 0 to 1."""
        return wait_ratio([self])

    @property
    def workers(self) -> int:
        """Of both pools."""
        return self.local + self.remote


def point_of(sample: Sample) -> CoursePoint:
    """What is drawn of a window."""
    return CoursePoint(
        at=sample.at,
        seconds=sample.seconds,
        batches=sample.batches,
        lost_s=sample.wait_s + sample.own_s,
        work_s=sample.work_s,
        local=sample.local.running,
        remote=sample.remote.running,
        prefetch=sample.settings.prefetch,
    )


def wait_ratio(points: Iterable[CoursePoint]) -> float:
    """Over all of these, from 0 to 1."""
    known = list(points)
    lost_s = sum(point.lost_s for point in known)
    total_s = lost_s + sum(point.work_s for point in known)
    return lost_s / total_s if total_s > 0 else 0.0


def joined(first: CoursePoint, second: CoursePoint) -> CoursePoint:
    """Two neighbours as one; what lay between them is nobody's."""
    return CoursePoint(
        at=second.at,
        seconds=first.seconds + second.seconds,
        batches=first.batches + second.batches,
        lost_s=first.lost_s + second.lost_s,
        work_s=first.work_s + second.work_s,
        local=second.local,
        remote=second.remote,
        prefetch=second.prefetch,
    )


def halved(points: Sequence[CoursePoint]) -> list[CoursePoint]:
    """Neighbours joined; one that has none is kept."""
    pairs = zip(points[::2], points[1::2], strict=False)
    return [joined(first, second) for first, second in pairs] + list(points[len(points) // 2 * 2 :])


class Course:
    """The points of a run so far, oldest first."""

    def __init__(self, most: int = MOST_POINTS) -> None:
        self._most = most
        self._points: list[CoursePoint] = []
        self._windows_each = 1
        self._waiting: CoursePoint | None = None
        self._waited = 0

    def add(self, sample: Sample) -> None:
        """Take a window in."""
        point = point_of(sample)
        self._waiting = point if self._waiting is None else joined(self._waiting, point)
        self._waited += 1
        if self._waited < self._windows_each:
            return
        points = [*self._points, self._waiting]
        self._waiting, self._waited = None, 0
        if len(points) >= self._most:
            points, self._windows_each = halved(points), 2 * self._windows_each
        self._points = points

    @property
    def points(self) -> tuple[CoursePoint, ...]:
        """All of it, the latest included."""
        waiting = self._waiting
        return (*self._points, *(() if waiting is None else (waiting,)))


def course_of(samples: Iterable[Sample]) -> tuple[CoursePoint, ...]:
    """Of a recorded run."""
    course = Course()
    for sample in samples:
        course.add(sample)
    return course.points
