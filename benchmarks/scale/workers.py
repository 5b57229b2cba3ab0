"""Local workers: what one training thread pays for 1 to 256 of them, beside torch."""

import json
import sys
import time
from typing import Any

from torch.utils.data import DataLoader

from benchmarks.scale.course import BATCH, BatchWaits, Course
from dpex import DpexDataLoader

RATE = 200.0
"""Batches per second of all workers together, whatever their number: the CPUs limit nothing."""
WHO = ("torch", "dpex", "auto")
NUMBERS = (1, 4, 16, 64, 256)


def main(argument: str) -> None:
    """Measure ``[who, workers, seconds]``, and print the figures."""
    who, workers, seconds = json.loads(argument)
    began = time.perf_counter()
    loader_class: Any = DataLoader if who == "torch" else DpexDataLoader
    count = "auto" if who == "auto" else workers
    loader = loader_class(BatchWaits(workers / RATE), batch_size=BATCH, num_workers=count)
    course = Course(iter(loader), began)
    found = course.run(seconds + 4 * workers / RATE, 0 if who == "auto" else workers)
    if who != "torch":
        found["running"] = loader.stats().pools["local"].running
        loader.close()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
