"""Remote workers behind a link of a given rate and round trip: the share of the link that batches use. Root only."""

import json
import os
import subprocess
import sys
import time
from typing import Any

from benchmarks.network.links import Link, Network, why_not
from benchmarks.network.nodes import agents_in
from benchmarks.process import ROOT
from benchmarks.scale.course import BatchWaits, Course
from dpex import AutotuneConfig, DpexDataLoader

RATES = (0.2e9, 1e9)
ROUND_TRIPS_S = (0.0002, 0.002, 0.020)
BATCH_BYTES = (100_000, 1_000_000, 10_000_000)
SAMPLES = 4
WORKERS = 4


def child(asked: dict[str, Any]) -> None:
    """Measure in the trainer's namespace, and print the figures."""
    with agents_in(asked["nodes"], asked["addresses"], WORKERS):
        data = BatchWaits(0.002, asked["nbytes"] // SAMPLES)
        began, arguments = time.perf_counter(), {"batch_size": SAMPLES, "distribute_mode": True}
        if asked["who"] == "auto":
            config = AutotuneConfig(max_local=0, min_remote=1)
            loader = DpexDataLoader(data, num_workers="auto", autotune=config, **arguments)
        else:
            loader = DpexDataLoader(data, num_workers=WORKERS, seeding="batch", **arguments)
        with loader:
            course = Course(iter(loader), began)
            found = course.run(asked["seconds"])
            remote = loader.stats().pools["remote"]
        carried = remote.tickets / max(1, sum(pool.tickets for pool in loader.stats().pools.values()))
        found["share"] = carried * found["rate"] * asked["nbytes"] * 8 / asked["bits_per_s"]
    print(json.dumps(found), flush=True)
    os._exit(0)


def main(argument: str) -> None:
    """Measure ``[who, bits per second, round trip in seconds, bytes of a batch, seconds]``."""
    asked = json.loads(argument)
    if isinstance(asked, dict):
        child(asked)
        return
    if why := why_not():
        print(json.dumps({"why_not": why}))
        return
    who, bits_per_s, round_trip_s, nbytes, seconds = asked
    with Network([Link(bits_per_s=bits_per_s, round_trip_s=round_trip_s)]) as network:
        asked = {"who": who, "bits_per_s": bits_per_s, "nbytes": nbytes, "seconds": seconds}
        asked |= {"nodes": network.nodes, "addresses": network.address}
        command = [*network.enter(network.trainer), sys.executable, "-m", __spec__.name, json.dumps(asked)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=seconds + 90, check=True)
        print(done.stdout.splitlines()[-1], flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
