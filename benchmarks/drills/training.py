"""A training with remote workers, as a process: `python -m benchmarks.drills.training ADDRESS NAP_S [WEIGHT]`.

Its loop never stops to compute, so it waits however many workers it has: a sample takes `NAP_S` seconds, a step a
hundredth. It prints, about four times a second, the time, its remote workers, and the share of its time that it waited
since the last line, of so many seconds.
"""

import json
import sys
import time

import numpy as np

from benchmarks.cluster import join
from benchmarks.works.waits import Waits
from dpex import AutotuneConfig, DpexDataLoader

LINE_S = 0.25
STEP_S = 0.01
BATCH_SIZE = 4


def main(address: str, nap_s: float, weight: float = 1.0) -> None:
    """Train until somebody ends this process."""
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
