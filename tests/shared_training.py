"""A training with remote workers, as a process of its own: `python shared_training.py ADDRESS NAP_S`.

Its loop never stops to compute, so it waits however many workers it has. It prints, about four times a second, its
remote workers and the share of its time that it waited since the last line.
"""

from __future__ import annotations

import json
import sys
import time

import families
import ray
from families import Augmented

from dpex import AutotuneConfig, DpexDataLoader

LINE_S = 0.25
STEP_S = 0.01


def main(address: str, nap_s: float) -> None:
    """Train until somebody ends this process."""
    ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    ray.cloudpickle.register_pickle_by_value(families)
    config = AutotuneConfig(max_local=0, min_remote=1, interval_s=0.25)
    loader = DpexDataLoader(
        Augmented(10_000_000, nap_s), batch_size=4, num_workers="auto", distribute_mode=True, autotune=config
    )
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
            print(json.dumps({"workers": running, "wait": waited_s / (now - line_at)}), flush=True)
            line_at, waited_s = now, 0.0


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]))
