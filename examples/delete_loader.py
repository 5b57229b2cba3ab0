"""A train loader of 10 workers and a test loader of 1, deleted half-way, one after the other: nothing stays.

python examples/delete_loader.py
python examples/delete_loader.py --distribute-mode    # workers on the Ray cluster
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
from options import parser
from pictures import pictures

PATIENCE_S = 10.0


def held() -> set[str]:
    """What this process holds that a loader may have brought: processes, Ray actors, shared memory."""
    family = psutil.Process().children(recursive=True)
    return {line for process in family if (line := describe(process))} | shared_memory([os.getpid()])


def describe(process: psutil.Process) -> str:
    """The process in words; empty if it is dead, or is Ray's own and not an actor."""
    try:
        if process.status() == psutil.STATUS_ZOMBIE:
            return ""
        names = [" ".join(p.cmdline()) for p in (process, *process.parents())]
    except psutil.NoSuchProcess:
        return ""
    own, is_actor = names[0], names[0].startswith("ray::") and "IDLE" not in names[0]
    if any("raylet" in name for name in names):
        return f"actor {own}" if is_actor else ""
    return "" if "/ray/" in own else f"process {process.pid}: {own[:60]}"


def shared_memory(pids: list[int]) -> set[str]:
    """Shared memory mapped by these processes, and files in /dev/shm that bear the id of one of them."""
    maps = (line for pid in pids for line in Path(f"/proc/{pid}/maps").read_text().splitlines())
    mapped = {line.split(None, 5)[5] for line in maps if "/dev/shm/" in line or "/memfd:" in line}
    named = {str(path) for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)}
    return mapped | named


def tally(things: set[str]) -> str:
    """How many of each kind."""
    kinds = Counter("shared memory" if thing.startswith("/") else thing.split()[0] for thing in things)
    return ", ".join(f"{kind}: {count}" for kind, count in sorted(kinds.items())) or "nothing"


def wait_for(before: set[str]) -> set[str]:
    """What is held beyond `before`, once nothing is or patience ends."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (left := held() - before) and time.monotonic() < deadline_s:
        time.sleep(0.05)
    return left


def main() -> int:
    """0 if nothing was left."""
    options = parser(__doc__, num_workers=10, distribute_mode=False).parse_args()
    place = {"distribute_mode": options.distribute_mode, "head_address": options.head_address}
    before = held()
    train = DpexDataLoader(pictures(train=True), batch_size=100, shuffle=True, num_workers=options.num_workers, **place)
    test = DpexDataLoader(pictures(train=False), batch_size=100, num_workers=1, **place)
    limit = 3 if options.limit is None else options.limit
    train_batches, test_batches = iter(train), iter(test)
    taken = len(list(islice(train_batches, limit))), len(list(islice(test_batches, 1)))
    print(f"taken: {taken[0]} batches to train, {taken[1]} to test; held: {tally(held() - before)}")

    del train, train_batches
    gc.collect()
    print(f"train loader deleted; the test loader goes on: {len(list(test_batches))} more batches")
    del test, test_batches
    gc.collect()
    left = wait_for(before)
    print("test loader deleted; left: " + ("nothing" if not left else "\n  ".join(sorted(left))))
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
