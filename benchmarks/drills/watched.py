"""A training process that is watched while something happens to it: what it got, when, and what it had to wait for."""

import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from queue import Empty, Queue
from tempfile import TemporaryFile
from typing import Any

from benchmarks.drills.trainer import Work
from benchmarks.process import ERROR_CHARACTERS, ROOT, MeasurementError
from dpex.system.clock import monotonic

PATIENCE_S = 120.0
"""For anything that is waited for: a machine that has much else to do takes a part of that."""
AFTER = 40
"""Batches that are taken after all is as it was, so that one that is lost or comes again is seen."""


@dataclass(frozen=True, kw_only=True)
class Told:
    """A batch: when it came, its numbers, the workers of each pool that ran then and the batches that it had made, and
    the deaths and late batches until then."""

    at: float
    batch: tuple[int, ...]
    running: dict[str, int]
    made: dict[str, int]
    deaths: int
    late: int

    @property
    def all_running(self) -> int:
        """Workers of all pools."""
        return sum(self.running.values())


class Watched:
    """Enter it to start the training; it is ended, at the latest, when this is left.

    enter: what to put before its command. environment: its environment, that of this process if None.
    """

    def __init__(self, work: Work, enter: Sequence[str] = (), environment: dict[str, str] | None = None) -> None:
        self.work = work
        self.batches: list[Told] = []
        self.warnings: list[str] = []
        self.end: dict[str, Any] = {}
        self._command = [*enter, sys.executable, "-m", "benchmarks.drills.trainer", json.dumps(asdict(work))]
        self._environment = environment
        self._lines: Queue[dict[str, Any] | None] = Queue()

    def __enter__(self) -> "Watched":
        self._errors = TemporaryFile("w+")
        self.process = subprocess.Popen(
            self._command,
            cwd=ROOT,
            env=self._environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )
        threading.Thread(target=self._read, name="drill", daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        assert self.process.stdin is not None
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self._errors.close()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as lines:
            for line in lines:
                if line.startswith("{"):
                    self._lines.put(json.loads(line))
        self._lines.put(None)

    # -- what it tells -----------------------------------------------------------------------------------------------

    def hear(self, timeout_s: float = 0.0) -> bool:
        """Take in what it told, and wait so long for the first of that; False once it has nothing more to say."""
        try:
            line = self._lines.get(timeout=timeout_s) if timeout_s else self._lines.get_nowait()
            while True:
                if line is None:
                    return False
                self._take(line)
                line = self._lines.get_nowait()
        except Empty:
            return True

    def _take(self, line: dict[str, Any]) -> None:
        if "batch" in line:
            self.batches.append(Told(**{**line, "batch": tuple(line["batch"])}))
        elif "warning" in line:
            self.warnings.append(line["warning"])
        else:
            self.end = line

    def until(self, true: Callable[[], Any], patience_s: float = PATIENCE_S) -> None:
        """Go on until that is so. Raises MeasurementError where it ends before, or patience does."""
        deadline = monotonic() + patience_s
        while not true():
            if not self.hear(0.2):
                raise MeasurementError(f"the training ended with code {self.process.wait()}: {self.errors()}")
            if monotonic() > deadline:
                about = f"{len(self.batches)} batches, the last {self.batches[-1:]}; {self.warnings}"
                raise MeasurementError(f"waited {patience_s:g} s in vain: {about}; {self.errors()}")

    def errors(self) -> str:
        """The end of what it wrote to standard error."""
        self._errors.seek(0)
        return self._errors.read().strip()[-ERROR_CHARACTERS:]

    # -- how it goes -------------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Workers of all pools when the last batch came."""
        return self.batches[-1].all_running if self.batches else 0

    @property
    def deaths(self) -> int:
        """When the last batch came."""
        return self.batches[-1].deaths if self.batches else 0

    @property
    def late(self) -> int:
        """Late batches when the last batch came."""
        return self.batches[-1].late if self.batches else 0

    def made_by(self, pool: str) -> int:
        """Batches of that pool when the last batch came."""
        return self.batches[-1].made.get(pool, 0) if self.batches else 0

    def until_all_run(self) -> int:
        """Go on until all workers run; returns how many there are."""
        wanted = self.work.workers + self.work.also_local
        self.until(lambda: self.running >= max(1, wanted))
        self.take(AFTER)
        return wanted

    def take(self, count: int) -> None:
        """Have it train on so many batches more."""
        until = len(self.batches) + count
        self.until(lambda: len(self.batches) >= until)

    def finish(self, patience_s: float = PATIENCE_S) -> int:
        """Tell it to end, and take in what it still has to say; returns its exit code."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        deadline = monotonic() + patience_s
        while self.hear(0.2):
            if monotonic() > deadline:
                raise MeasurementError(f"it does not end: {self.errors()}")
        return self.process.wait(patience_s)

    @property
    def numbers(self) -> list[int]:
        """Of all samples, in the order in which they came."""
        return [number for told in self.batches for number in told.batch]

    @property
    def lost(self) -> int:
        """Samples that did not come although later ones did."""
        came = set(self.numbers)
        return max(came, default=-1) + 1 - len(came)

    @property
    def repeated(self) -> int:
        """Samples that came again."""
        return sum(count - 1 for count in Counter(self.numbers).values())

    def longest_wait_s(self, since: float) -> float:
        """The longest time without a batch that ended after that moment."""
        times = [told.at for told in self.batches]
        return max(later - max(before, since) for before, later in pairwise(times) if later > since)
