"""A recording of a run in Chrome's trace format: the batches of each worker, and the calls of the training loop.

Two threads append rows: the receiver of results, and the caller of ``next()``. Nothing is computed before the recording
is written. The format follows Google's "Trace Event Format" document: complete events ("X") with times in microseconds,
and metadata events ("M") with the names of processes and threads. https://ui.perfetto.dev reads it. PURE.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any

from dpex.measure.batch_times import BatchTimes

KEPT = 200_000
"""Maximum number of batches, and of calls of ``next()``, in a recording: the latest."""
LOOP, WORKERS = 1, 2
"""Numbers of the two groups of rows that the trace shows as processes."""


class Timeline:
    """Records batches and calls of ``next()``. ``began``: Start of the recording, by the clock of all other times."""

    def __init__(self, began: float) -> None:
        self._began = began
        self._made: deque[tuple[int, int, int, BatchTimes]] = deque(maxlen=KEPT)
        self._calls: deque[tuple[float, float, bool]] = deque(maxlen=KEPT)

    def made(self, epoch: int, number: int, worker: int, times: BatchTimes) -> None:
        """Record a batch of a worker. ``times`` contain the time at which the batch ended."""
        self._made.append((epoch, number, worker, times))

    def call(self, entered: float, left: float, is_over: bool) -> None:
        """Record a call of ``next()`` from ``entered`` to ``left``. ``is_over``: True if the call ended the pass."""
        self._calls.append((entered, left, is_over))

    def trace(self, pid: int) -> dict[str, Any]:
        """Return the recording, to be written as JSON. ``pid``: The id of the training process."""
        return {"displayTimeUnit": "ms", "traceEvents": list(self._events(pid))}

    def _events(self, pid: int) -> Iterator[dict[str, Any]]:
        yield _name("process_name", LOOP, 0, f"training process {pid}")
        yield _name("thread_name", LOOP, 0, "training loop")
        yield _name("process_name", WORKERS, 0, "workers")
        yield from self._loop()
        for worker in sorted({row[2] for row in self._made}):
            yield _name("thread_name", WORKERS, worker, f"worker {worker}")
        for epoch, number, worker, times in list(self._made):
            yield from self._batch(epoch, number, worker, times)

    def _loop(self) -> Iterator[dict[str, Any]]:
        """The waits and steps of the loop: a step is the time between two calls of a pass."""
        left, batch = 0.0, 0
        for entered, until, is_over in list(self._calls):
            if left:
                yield self._event("step", LOOP, 0, left, entered, {"batch": batch - 1})
            yield self._event("next()", LOOP, 0, entered, until, {"batch": batch})
            left, batch = (0.0, 0) if is_over else (until, batch + 1)

    def _batch(self, epoch: int, number: int, worker: int, times: BatchTimes) -> Iterator[dict[str, Any]]:
        at = times.ended_at - times.busy_s
        told = {"epoch": epoch, "samples": times.samples, "bytes": times.nbytes, "cpu_ms": round(times.cpu_s * 1e3, 3)}
        yield self._event(f"batch {number}", WORKERS, worker, at, times.ended_at, told)
        for name, seconds in (("load", times.load_s), ("collate", times.collate_s), ("encode", times.encode_s)):
            yield self._event(name, WORKERS, worker, at, at + seconds, {})
            at += seconds

    def _event(
        self, name: str, group: int, thread: int, began: float, ended: float, told: dict[str, Any]
    ) -> dict[str, Any]:
        start_us = round((began - self._began) * 1e6)
        duration_us = round((ended - self._began) * 1e6) - start_us
        found = {"name": name, "ph": "X", "pid": group, "tid": thread, "ts": start_us, "dur": max(0, duration_us)}
        return {**found, "args": told} if told else found


def _name(kind: str, group: int, thread: int, text: str) -> dict[str, Any]:
    return {"name": kind, "ph": "M", "pid": group, "tid": thread, "args": {"name": text}}
