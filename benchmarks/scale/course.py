"""What the measured processes of the parts share: the samples, and the figures of a course."""

import os
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset

from benchmarks.machine import tree_bytes

BATCH = 16
EVERY_S = 0.1


class BatchWaits(Dataset[torch.Tensor]):
    """Samples that come as a batch after one wait; they take no CPU, so many workers fit on few CPUs.

    A sample is int64 with its index, the process that made it, and zeros up to ``nbytes``.
    """

    def __init__(self, wait_s: float, nbytes: int = 64, length: int = 10**8) -> None:
        self.wait_s, self.values, self.length = wait_s, max(2, nbytes // 8), length

    def __len__(self) -> int:
        return self.length

    def __getitems__(self, indices: list[int]) -> list[torch.Tensor]:
        time.sleep(self.wait_s)
        samples = torch.zeros(len(indices), self.values, dtype=torch.int64)
        samples[:, 0], samples[:, 1] = torch.tensor(indices), os.getpid()
        return list(samples)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.__getitems__([index])[0]


class Course:
    """Batches of an iterator as they come.

    Args:
        batches: The iterator.
        began: `time.perf_counter` before the loader was made.
        step_s: Seconds of a training step, which is a wait.
    """

    def __init__(self, batches: Iterator[Any], began: float, step_s: float = 0.0) -> None:
        self.batches, self.began, self.step_s = batches, began, step_s
        self.seen: set[int] = set()
        """Processes that made a batch."""
        self.count = 0
        self.marks: list[tuple[float, int]] = []
        """Seconds since the beginning, and batches until then."""
        self.all_s: float | None = None
        self.cpu = (0.0, 0)
        """CPU seconds of this thread and batches, at the middle."""

    def run(self, seconds: float, workers: int = 0) -> dict[str, Any]:
        """Take batches for so many seconds; return the figures. ``workers``: those that must have made a batch."""
        while time.perf_counter() - self.began < seconds:
            batch = next(self.batches)
            now = time.perf_counter() - self.began
            self.count += 1
            if workers and self.all_s is None:
                self.seen.add(int(batch[0, 1]))
                self.all_s = now if len(self.seen) >= workers else None
            if not self.marks or now - self.marks[-1][0] > EVERY_S:
                self.marks.append((now, self.count))
            if self.step_s:
                time.sleep(self.step_s)
            if not self.cpu[1] and now > seconds / 2:
                self.cpu = (time.thread_time(), self.count)
        return self.figures()

    def figures(self) -> dict[str, Any]:
        """Return the figures: rates in batches per second over the second half, CPU in microseconds per batch."""
        half = next(mark for mark in self.marks if mark[0] > self.marks[-1][0] / 2)
        rate = (self.marks[-1][1] - half[1]) / (self.marks[-1][0] - half[0])
        thread_s, before = self.cpu
        return {
            "first_s": self.marks[0][0],
            "all_s": self.all_s,
            "full_s": self.full_s(rate),
            "rate": rate,
            "thread_us": 1e6 * (time.thread_time() - thread_s) / max(1, self.count - before),
            "memory_gb": tree_bytes() / 1e9,
        }

    def full_s(self, rate: float, from_s: float = 0.0) -> float | None:
        """Return when the first second with 90 % of a rate began, after ``from_s``; None: there was none."""
        for at, count in self.marks:
            if at >= from_s:
                later = next(((s, n) for s, n in self.marks if s >= at + 1), None)
                if later is not None and later[1] - count >= 0.9 * rate * (later[0] - at):
                    return at - from_s
        return None
