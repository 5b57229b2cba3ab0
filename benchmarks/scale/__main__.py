"""`python -m benchmarks.scale`: how far dpex scales, beside PyTorch, Ray Data and tf.data service.

Each part runs alone (``python -m benchmarks.scale nodes``), and goes on where it was cut off. Results are kept in one
file of JSON, of which ``--write`` makes the tables and plots of docs/scale.md.
"""

import argparse
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.network.links import why_not
from benchmarks.parts import Parts, rewritten
from benchmarks.process import ROOT
from benchmarks.scale import links, nodes, page, ranks, shares, starts, workers
from benchmarks.scale.model import Cluster, Simulation

KEPT = ROOT / "benchmarks/results/scale/kept.json"
"""The results that the page shows."""
SIMULATED = (1, 2, 4, 8, 16, 64, 256, 1000)


class Asked:
    """What the command was asked for."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.parts = Parts(options.results)
        self.is_quick: bool = options.quick
        self.tensorflow: str | None = options.tensorflow

    def few(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return all values, or the middle one."""
        return (values[len(values) // 2],) if self.is_quick else values

    def seconds(self, usual: float) -> float:
        return usual / 2 if self.is_quick else usual

    def measure(self, part: str, module: str, *values: Any, limit_s: float = 180.0) -> None:
        """Measure one line, with the values as its key."""
        key = ", ".join(str(value) for value in values)
        self.parts.measure(part, key, f"benchmarks.scale.{module}", json.dumps(values), limit_s)


def measure_workers(asked: Asked) -> None:
    """Part 1: 1 to 256 local workers."""
    for number in asked.few(workers.NUMBERS):
        for who in workers.WHO:
            if who != "auto" or number == 64:
                asked.measure("workers", "workers", who, number, asked.seconds(8.0))


def measure_nodes(asked: Asked) -> None:
    """Part 2: 1 to 8 nodes."""
    for count in asked.few(nodes.NODES):
        seconds = asked.seconds(30.0 if count < nodes.NODES[-1] else 60.0)
        for who in nodes.WHO:
            if not who.startswith("tf"):
                asked.measure("nodes", "nodes", who, count, seconds)
            elif asked.tensorflow:
                key, argument = f"{who}, {count}, {seconds}", [count, nodes.CPUS, nodes.WAIT_S, seconds]
                if key not in asked.parts.of("nodes"):
                    asked.parts.keep("nodes", key, _of_tensorflow(asked.tensorflow, argument, seconds + 90))


def _of_tensorflow(python: str, argument: list[Any], limit_s: float) -> Any:
    script = ROOT / "benchmarks/scale/tf_service.py"
    command, environment = [python, str(script), json.dumps(argument)], {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=True, env=environment)
    return json.loads(done.stdout.splitlines()[-1])


def measure_links(asked: Asked) -> None:
    """Part 3: links of two rates and three round trips."""
    if why := why_not():
        print(f"links: not measured, as {why}")
        return
    for rate in asked.few(links.RATES):
        for trip in asked.few(links.ROUND_TRIPS_S):
            for nbytes in asked.few(links.BATCH_BYTES):
                for who in ("fixed", "auto"):
                    asked.measure("links", "links", who, rate, trip, nbytes, asked.seconds(12.0))


def measure_starts(asked: Asked) -> None:
    """The first batch on a cluster."""
    for count in asked.few(starts.NODES):
        asked.measure("starts", "starts", count, 1 if asked.is_quick else 3, limit_s=600.0)


def measure_ranks(asked: Asked) -> None:
    """Part 4: ranks of one job."""
    for count in asked.few(ranks.RANKS):
        for who in ranks.WHO:
            asked.measure("ranks", "ranks", who, count, asked.seconds(12.0), limit_s=300.0)


def measure_shares(asked: Asked) -> None:
    """Part 5: four trainings on one cluster, which come and go."""
    asked.measure("shares", "shares", shares.TRAININGS, limit_s=600.0)


def measure_faults(asked: Asked) -> None:
    """Part 6: one of four nodes is killed, or the control service."""
    for what in asked.few(nodes.FAULTS):
        asked.measure("faults", "nodes", what, 4, asked.seconds(30.0))


def measure_large(asked: Asked) -> None:
    """Part 7: large things."""
    parts = {
        "shuffle": ("torch", "dpex"),
        "alive": ("torch", "dpex", "auto"),
        "send": ("dpex", "Ray tasks"),
        "carry": ("dpex",),
    }
    for part, whos in parts.items():  # the longest are left out where it is to be quick
        if asked.is_quick and part == "send":
            continue
        for who in whos:
            asked.measure("large", "large", part, who)


def measure_model(asked: Asked) -> None:
    """Part 8: the simulation, with the costs that parts 1 and 2 measured."""
    measured = page.fixed_nodes(asked.parts.of("nodes"))
    thread_s = max([found["thread_us"] for found in measured.values()] or [400.0]) / 1e6
    for count in asked.few(SIMULATED):
        for name, changes in page.MODELS.items():
            cluster = Cluster(nodes=count, thread_s=thread_s, batch_s=nodes.WAIT_S, workers=nodes.CPUS, **changes)
            seconds = 10.0 if count > 64 else 60.0
            outcome = Simulation(cluster).run(seconds)
            asked.parts.keep("model", f"{name}, {count}", {"thread_us": 1e6 * thread_s, **vars(outcome)})


PARTS: dict[str, Callable[[Asked], None]] = {
    "workers": measure_workers,
    "nodes": measure_nodes,
    "links": measure_links,
    "starts": measure_starts,
    "ranks": measure_ranks,
    "shares": measure_shares,
    "faults": measure_faults,
    "large": measure_large,
    "model": measure_model,
}


def written(results: Path) -> Iterator[str]:
    """Write tables and plots into the page; yield the names of what was written."""
    found = json.loads(results.read_text())
    page.DOCUMENT.write_text(rewritten(page.DOCUMENT.read_text(), page.tables(found)))
    yield page.DOCUMENT.name
    yield from page.plots(found)


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.scale", description=__doc__)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (all)")
    parser.add_argument("--quick", action="store_true", help="few sizes and short courses: not to be quoted")
    parser.add_argument(
        "--tensorflow", metavar="PYTHON", help="an interpreter that has TensorFlow, for tf.data service"
    )
    parser.add_argument("--results", type=Path, default=KEPT.with_name("local.json"), help="a file to continue")
    parser.add_argument("--write", action="store_true", help=f"only make the page of {KEPT.name}, or of --results")
    options = parser.parse_args()
    if options.write:
        results = options.results if options.results.exists() else KEPT
        print(*written(results), sep="\n")
        return
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    asked = Asked(options)
    for name in options.parts or PARTS:
        PARTS[name](asked)


if __name__ == "__main__":
    main()
