"""`python -m benchmarks.origin`: the two tables of the project that dpex began as.

The first trains one network in three ways, with each loader, with workers of this machine and of a Ray cluster. Rows
with the same seeding must end with the same weights, bit for bit. The second takes a pipeline of small image files
through the steps by which people made it faster by hand, and through those of dpex; each course runs in turns with the
others. Figures go into a file, which a later call continues, and the tables are printed as Markdown.
"""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.cluster import raylets
from benchmarks.origin.steps import STEPS
from benchmarks.origin.training import WAYS, Run, as_argument
from benchmarks.parts import Parts, origin
from benchmarks.process import ROOT, run_module

DOCUMENT = ROOT / "docs/benchmarks.md"
KEPT = ROOT / "benchmarks/results/origin/kept.json"
"""The results whose tables stand in `DOCUMENT`."""
LIMIT_S = 300.0
CPUS_OF_THE_NODE = 4
LOADERS: dict[str, tuple[str, dict[str, Any]]] = {
    "PyTorch, 2 workers": ("torch", {"num_workers": 2}),
    "dpex, 2 workers": ("dpex", {"num_workers": 2}),
    'dpex, 2 workers, seeding="batch"': ("dpex", {"num_workers": 2, "seeding": "batch"}),
    'dpex, "auto"': ("dpex", {"num_workers": "auto"}),
}


def rows(epochs: int) -> Iterator[tuple[str, str, Run]]:
    """Yield key, loader and run of each row of the first table. PyTorch has no workers on other machines."""
    for way in WAYS:
        for name, (loader, arguments) in LOADERS.items():
            for distributed in (False, True) if loader == "dpex" else (False,):
                mode = {"distribute_mode": True} if distributed else {}
                run = Run(way=way, loader=loader, arguments=arguments | mode, epochs=epochs)
                yield f"{way} | {'on' if distributed else 'off'} | {name}", name, run


def measure_trainings(kept: Parts, epochs: int) -> None:
    """Train each row that is missing; those with workers on Ray share a cluster."""
    left = [(key, run) for key, _, run in rows(epochs) if key not in kept.of("trainings")]
    for key, run in left:
        if not run.arguments.get("distribute_mode"):
            kept.measure("trainings", key, "benchmarks.origin.training", as_argument(run), LIMIT_S)
    remote = [(key, run) for key, run in left if run.arguments.get("distribute_mode")]
    if not remote:
        return
    with raylets([CPUS_OF_THE_NODE]) as address:
        for key, run in remote:
            run.arguments["head_address"] = address
            kept.measure("trainings", key, "benchmarks.origin.training", as_argument(run), LIMIT_S)


def measure_steps(kept: Parts, rounds: int, seconds: float) -> None:
    """Measure each step in turns. Those on a device are left out where there is no GPU."""
    there = [n for n, step in enumerate(STEPS) if not step.on_device or torch.cuda.is_available()]
    for turn in range(rounds):
        for number in there if turn % 2 == 0 else reversed(there):
            key = f"{STEPS[number].loader}: {STEPS[number].name}"
            before = kept.of("steps").get(key, [])
            if len(before) > turn:
                continue
            found = json.loads(run_module("benchmarks.origin.steps", f"{number} {seconds}", LIMIT_S))
            kept.keep("steps", key, [*before, found])


def trainings_table(found: dict[str, Any], epochs: int) -> Iterator[str]:
    """Yield the lines of the first table."""
    yield "| accuracy | loss | weights | s per epoch | waiting | devices | `distribute_mode` | loader |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for key, name, run in rows(epochs):
        if (row := found.get(key)) is not None:
            on = "on" if run.arguments.get("distribute_mode") else "off"
            figures = f"{row['accuracy']:.2%} | {row['loss']:.4f} | `{row['weights']}` | {row['epoch_s']:.2f}"
            yield f"| {figures} | {row['waiting']:.0%} | {run.way} | {on} | {name} |"


def steps_table(found: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of the second table: rates after the start, ratios within a round, the verdict before the next
    step."""
    yield "| step | batches/s | over PyTorch | waiting | the diagnosis then says |"
    yield "| --- | --- | --- | --- | --- |"
    base = found.get(f"torch: {STEPS[0].name}", [])
    for step in STEPS:
        rounds = found.get(f"{step.loader}: {step.name}")
        if not rounds:
            yield f"| {step.name} | - | - | - | not measured: it needs a GPU |"
            continue
        ratio = median(each["rate"] / first["rate"] for each, first in zip(rounds, base, strict=False))
        rate, waiting = (median(each[name] for each in rounds) for name in ("rate", "waiting"))
        last = rounds[-1]
        said = f"{last['verdict']}: {last['advice'].partition(': ')[0]}".rstrip(".")
        yield f"| {step.name} | {rate:.1f} | {ratio:.2f}x | {waiting:.0%} | {said} |"


def tables(found: dict[str, Any], epochs: int = 3) -> dict[str, str]:
    """Return the blocks of the page by name."""
    lines = {
        "origin:trainings": trainings_table(found.get("trainings", {}), epochs),
        "origin:steps": steps_table(found.get("steps", {})),
    }
    return {name: "\n".join([*each, "", origin(found)]) for name, each in lines.items()}


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.origin", description=__doc__)
    parser.add_argument("parts", nargs="*", default=["trainings", "steps"], help="trainings, steps (both)")
    parser.add_argument("--epochs", type=int, default=3, help="of a training (3)")
    parser.add_argument("--rounds", type=int, default=3, help="of the steps (3)")
    parser.add_argument("--seconds", type=float, default=8.0, help="of a course of the steps (8)")
    parser.add_argument("--results", type=Path, default=KEPT.with_name("local.json"), help="a file to continue")
    options = parser.parse_args()
    kept = Parts(options.results)
    if "trainings" in options.parts:
        measure_trainings(kept, options.epochs)
    if "steps" in options.parts:
        measure_steps(kept, options.rounds, options.seconds)
    for name, table in tables(kept.found, options.epochs).items():
        print(f"\n{name}\n\n{table}")


if __name__ == "__main__":
    main()
