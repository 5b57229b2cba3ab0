"""Delete loaders in the middle of an epoch: no process, no Ray actor and no shared memory stays behind.

    python examples/delete_loader.py
    python examples/delete_loader.py --distribute-mode    # workers on the Ray cluster

A loader with 10 workers and one with a single worker are used and deleted, one after the other.
"""

import gc
import os
import sys
import time
from collections import Counter
from itertools import islice
from pathlib import Path

import psutil

from dpex import DpexDataLoader
from options import parser, workers
from pictures import pictures

PATIENCE_S = 10.0
"""How long the workers of a deleted loader may take to end."""


def held() -> set[str]:
    """Return what of this process may be a loader's: processes, Ray actors and shared memory."""
    family = psutil.Process().children(recursive=True)
    return {line for process in family if (line := describe(process))} | shared_memory([os.getpid()])


def describe(process: psutil.Process) -> str:
    """Return the process in words; "" if it has ended, or if it is one of Ray's own and no actor."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        names = [" ".join(p.cmdline()) for p in (process, *process.parents())]
    except psutil.NoSuchProcess:
        return ""
    own, is_actor = names[0], names[0].startswith("ray::") and "IDLE" not in names[0]
    if any("raylet" in name for name in names):
        return f"actor {own}" if is_actor else f"remote process {process.pid}" if "dpex" in own else ""
    return "" if "/ray/" in own else f"process {process.pid}: {own[:60]}"


def shared_memory(pids: list[int]) -> set[str]:
    """Return the shared memory that these processes map, and files in /dev/shm with the id of one of them."""
    maps = (line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    mapped = {line.split(None, 5)[5] for line in maps if "/dev/shm/" in line or "/memfd:" in line}
    named = {str(path) for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)}
    return mapped | named


def tally(things: set[str]) -> str:
    """Return how many there are of each kind, in words."""
    kinds = Counter("shared memory" if thing.startswith("/") else thing.split()[0] for thing in things)
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())) or "nothing"


def wait_for(before: set[str]) -> set[str]:
    """Return what is held beyond `before`, as soon as that is nothing, or when the time is up."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def main() -> int:
    """Return 0 if nothing stayed behind, else 1."""
    options = parser(__doc__, num_workers=2, distribute_mode=False).parse_args()
    before = held()
    train = DpexDataLoader(pictures(train=True), batch_size=100, shuffle=True, **workers(options))
    test = DpexDataLoader(pictures(train=False), batch_size=100, **workers(options) | {"num_workers": 1})
    limit = 3 if options.limit is None else options.limit
    train_batches, test_batches = iter(train), iter(test)
    taken = len(list(islice(train_batches, limit))), len(list(islice(test_batches, 1)))
    print(f"{taken[0]} batches were taken to train and {taken[1]} to test. Held now: {tally(held() - before)}.")

    del train, train_batches
    gc.collect()
    print(f"The train loader was deleted. The test loader went on with {len(list(test_batches))} more batches.")
    del test, test_batches
    gc.collect()
    left = wait_for(before)
    print("The test loader was deleted. Left behind: " + ("\n  ".join(sorted(left)) if left else "nothing."))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
