"""A training with remote workers, as a process: `python -m benchmarks.drills.training ADDRESS NAP_S [WEIGHT]`.

Its loop never stops to compute, so it waits however many workers it has: a sample takes `NAP_S` seconds, a step a
hundredth. It prints, about four times a second, the time, its remote workers, and the share of its time that it waited
since the last line, of so many seconds.
"""

import json
import signal
import subprocess
import sys
import threading
import time

import numpy as np

from benchmarks.cluster import join
from benchmarks.process import Surroundings
from benchmarks.works.waits import Waits
from dpex import AutotuneConfig, DpexDataLoader

LINE_S = 0.25
STEP_S = 0.01
BATCH_SIZE = 4
LOOKS = 3
"""Lines in a row that must say the same."""


class Training:
    """This module as a process; `lines` holds what it has printed, parsed, and `errors` what it wrote as it ended."""

    def __init__(self, address: str, nap_s: float, weight: float = 1.0) -> None:
        where = Surroundings()
        command = [where.python, "-m", "benchmarks.drills.training", address, str(nap_s), str(weight)]
        self.process = subprocess.Popen(
            command, cwd=where.folder, env=where.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[dict[str, float]] = []
        self.errors = ""
        for read in (self._read, self._read_errors):
            threading.Thread(target=read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(json.loads(line))

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        self.errors = self.process.stderr.read()

    def kill(self) -> None:
        """End the process as a scheduler or a lack of memory would."""
        self.process.kill()
        self.process.wait()

    def end(self) -> None:
        """End the training in order."""
        self.process.terminate()
        self.process.wait()

    @property
    def workers(self) -> set[float]:
        """Those of the latest lines."""
        return {line["workers"] for line in self.lines[-LOOKS:]}


def main(address: str, nap_s: float, weight: float = 1.0) -> None:
    """Train until somebody ends this process; SIGTERM ends it in order."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    join(address)
    config = AutotuneConfig(max_local=0, min_remote=1, interval_s=LINE_S, cluster_weight=weight)
    dataset = Waits(np.array([nap_s]))
    loader = DpexDataLoader(dataset, batch_size=BATCH_SIZE, num_workers="auto", distribute_mode=True, autotune=config)
    line_at, waited_s = time.monotonic(), 0.0
    batches = iter(loader)
    while True:
        began = time.monotonic()
        next(batches)
        waited_s += time.monotonic() - began
        time.sleep(STEP_S)
        now = time.monotonic()
        if now - line_at > LINE_S:
            pools = loader.stats().pools
            running = pools["remote"].running if "remote" in pools else 0
            line = {"at": time.time(), "seconds": now - line_at, "workers": running, "wait": waited_s / (now - line_at)}
            print(json.dumps(line), flush=True)
            line_at, waited_s = now, 0.0


if __name__ == "__main__":
    main(sys.argv[1], *map(float, sys.argv[2:]))
