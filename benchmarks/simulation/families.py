"""Worlds of three kinds that generated ones seldom are, each a function of a seed and a number: `--fuzz N --kind KIND`.

* ``busy``: other programs take 25 to 100 % of the CPUs for 2 to 20 s at a time, from before the start on. In a third of
  the worlds they come and go with a fixed period of 0.5 to 8 s, so that they may keep time with the trials of a
  controller; in a third the quota of CPUs changes as well.
* ``saturated``: 8 to 64 CPUs, work that only computes and needs 0.5 to 4 times as many, and a step that needs a CPU for
  all of its time.
* ``short``: epochs of 5 to 200 batches, whose workers are started anew for each or live on.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Mapping
from typing import Any

from benchmarks.simulation.scenarios import Scenario, scenario_of

_SECONDS = 60.0


def busy(seed: int, number: int) -> Scenario:
    """A world on a machine that others use."""
    rng = random.Random(f"busy {seed} {number}")
    cpus = rng.choice((2, 4, 8, 16))
    batch_s = _log_uniform(rng, 0.01, 0.3)
    computes = rng.choice((1.0, 1.0, rng.uniform(0.2, 0.8), 0.05))
    at_once = cpus if computes > 0.2 else 2 * cpus
    step_s = max(0.005, batch_s / at_once * _log_uniform(rng, 0.5, 3.0))
    kind = ("random", "regular", "quota")[number % 3]
    on_s = _log_uniform(rng, 0.5, 8.0) if kind == "regular" else rng.uniform(2.0, 20.0)
    off_s = on_s if kind == "regular" else on_s * rng.uniform(0.5, 2.0)
    bursts = {"cpus": cpus * rng.uniform(0.25, 1.0), "on_s": on_s, "off_s": off_s, "is_regular": kind == "regular"}
    step = {"gpu_s": 0.8 * step_s, "cpu_s": 0.2 * step_s, "spread": rng.choice((0.0, 0.1))}
    phases: list[dict[str, Any]] = [{"at": 0, "work": _work(rng, batch_s, computes), "step": step}]
    if kind == "quota":
        quotas = ((at, max(1.0, cpus * rng.uniform(0.25, 1.0))) for at in (15.0, 30.0, 45.0))
        phases += [{"at": at, "cpus": quota} for at, quota in quotas]
    world = {**_machine(rng, cpus), "bursts": bursts}
    return _scenario("busy", seed, number, kind, world, phases)


def saturated(seed: int, number: int) -> Scenario:
    """A machine whose CPUs are all needed, by the step too."""
    rng = random.Random(f"saturated {seed} {number}")
    cpus = rng.choice((8, 16, 32, 64))
    batch_s = _log_uniform(rng, 0.05, 1.0) * cpus / 16
    step_s = batch_s / (cpus * _log_uniform(rng, 0.5, 4.0))
    step: dict[str, Any] = {"gpu_s": 0.0, "cpu_s": step_s, "spread": rng.choice((0.0, 0.1))}
    world = _machine(rng, cpus)
    phases = [{"at": 0, "work": _work(rng, batch_s, 1.0), "step": step}]
    return _scenario("saturated", seed, number, f"{batch_s / step_s / cpus:.2f} times the CPUs", world, phases)


def short(seed: int, number: int) -> Scenario:
    """Short passes over a small dataset."""
    rng = random.Random(f"short {seed} {number}")
    cpus = rng.choice((2, 4, 8, 16))
    batch_s = _log_uniform(rng, 0.01, 0.3)
    computes = rng.choice((1.0, 0.5, 0.1))
    step_s = max(0.002, batch_s / cpus * _log_uniform(rng, 0.3, 4.0))
    is_kept = number % 2 == 1
    epochs = {
        "batches": round(_log_uniform(rng, 5, 200)),
        "is_kept": is_kept,
        "between_s": rng.choice((0.0, 0.05, 0.5)),
    }
    world = {**_machine(rng, cpus), "epochs": epochs, "start_cpu_s": _log_uniform(rng, 0.02, 0.5)}
    phases = [
        {"at": 0, "work": _work(rng, batch_s, computes), "step": {"gpu_s": 0.8 * step_s, "cpu_s": 0.2 * step_s}},
    ]
    kind = f"epochs of {epochs['batches']} batches, workers {'kept' if is_kept else 'started anew'}"
    return _scenario("short", seed, number, kind, world, phases)


FAMILIES: Mapping[str, Callable[[int, int], Scenario]] = {"busy": busy, "saturated": saturated, "short": short}


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _machine(rng: random.Random, cpus: float) -> dict[str, Any]:
    return {
        "cpus": cpus,
        "own_s": 3e-4,
        "fork_s": _log_uniform(rng, 0.01, 0.1),
        "worker_bytes": 1e8,
        "memory": 1e12,
        "noise": rng.choice((0.0, 0.02)),
        "thrash": rng.choice((0.0, 0.0, 0.005)),
        "seed": rng.randrange(10**6),
    }


def _work(rng: random.Random, batch_s: float, computes: float) -> dict[str, Any]:
    return {
        "wait_s": (1.0 - computes) * batch_s,
        "cpu_s": computes * batch_s,
        "encode_s": 0.02 * computes * batch_s,
        "spread": rng.choice((0.0, 0.2, 0.5)),
        "batch_bytes": 1e6,
    }


def _scenario(
    family: str, seed: int, number: int, why: str, world: dict[str, Any], phases: list[dict[str, Any]]
) -> Scenario:
    """One interval: what changes in it changes for the fixed setting as well."""
    entry = {"name": f"{family}:{seed}:{number}", "why": why, "seconds": _SECONDS, "world": world, "phases": phases}
    return scenario_of(family, {**entry, "judged_at": [0]})
