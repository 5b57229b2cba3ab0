"""Worlds by the hundred: each a function of a seed and a number, with parameters from wide distributions.

What is drawn, and how:

* CPUs: 2 to 64. One batch: 0.1 ms to 10 s, log-uniform; a third of the worlds only computes, a third mostly waits, the
  rest is mixed. Copying into shared memory: up to 30 % of the CPU. Batches of 10 kB to 100 MB.
* Step: none in 15 %, else 1 % to 300 % of a batch's time shared by log-uniform 1 to 32, at most 1 s; some of it CPU.
* Spread: none in 40 %, else a sigma up to 1, of which 40 % have a memory of 5 to 200 batches.
* Each of these with some probability: rare slow batches, slow shards, a page cache that warms up, storage that all
  readers share, other people's programs (constant, or coming and going), hyper-threads, memory contention, slow
  spells of workers or nodes, pauses of the trainer or of everything, tight memory, limits in the configuration,
  several ranks, a cluster, noise, CPU clocks of 10 ms, no run-queue figures, and work, step or cluster that change
  half-way.

A run is as long as some 8 000 batches take, 10 to 120 s; slow batches are given time for 300. It is at least 150 times
as long as a worker takes for a batch, as nothing can be learnt before the first is there. Half an hour at most.
"""

from __future__ import annotations

import math
import random
from typing import Any

from benchmarks.simulation.scenarios import Scenario, scenario_of

_CPUS = (2, 4, 6, 8, 12, 16, 24, 32, 48, 64)
_BATCHES, _LEAST_BATCHES = 8000, 300
_SHORTEST_S, _LONG_S, _LONGEST_S = 10.0, 120.0, 1800.0
_LEAST_SERVICES = 150
"""A run lasts for so many batches of one worker. A batch must be made before anything is known, others before it is
known what a change brought: three of them are two percent of a run. In shorter runs chance decides, as the rate hangs
on when the few last batches in turn come."""
_MOST_STEP_S = 1.0
_LEAST_CHANGED_S = 30.0
"""Shorter runs do not change half-way."""
_RARE = 40.0
"""A rare batch takes at most the run's time over this."""


def generate(seed: int, number: int) -> Scenario:
    """The world of that number."""
    return scenario_of("generated", described(seed, number))


def described(seed: int, number: int) -> dict[str, Any]:
    """The same as an object of a scenario file."""
    return _Generator(random.Random(f"world {seed} {number}")).described(f"{seed}:{number}")


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return math.exp(rng.uniform(math.log(low), math.log(high)))


def _good_rate(world: dict[str, Any], first: dict[str, Any]) -> float:
    """Roughly the rate that a good setting has at first."""
    work, step = first["work"], first["step"]
    cpu_s = work["cpu_s"] + work["encode_s"]
    batch_s = work["wait_s"] + cpu_s + _reading_s(first)
    step_s = step.get("gpu_s", 0.0) + step.get("cpu_s", 0.0)
    cpus = world["cpus"] / world.get("ranks", 1) + first.get("nodes", 0)
    made = min(cpus / max(1e-9, cpu_s), 64 / batch_s)
    return float(max(1.0 / (batch_s + step_s), min(made, 1.0 / (step_s + world["own_s"]))))


def _service_s(first: dict[str, Any]) -> float:
    """How long a worker takes for a batch if it is alone, on average over fast and slow shards."""
    work = first["work"]
    shards = work.get("shards", {"share": 0.0, "factor": 1.0})
    return float((_total_s(work) + _reading_s(first)) * (1.0 + shards["share"] * (shards["factor"] - 1.0)))


def _reading_s(first: dict[str, Any]) -> float:
    """What of that one reader alone takes at the storage."""
    return float(first["work"]["read"] / first["storage"]["reader"]) if "storage" in first else 0.0


def _total_s(work: dict[str, Any]) -> float:
    return float(work["wait_s"] + work["cpu_s"])


class _Generator:
    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._told: list[str] = []

    def described(self, name: str) -> dict[str, Any]:
        """See `described`."""
        world, work = self._world(), self._work()
        step = self._step(work)
        first: dict[str, Any] = {"at": 0, "work": work, "step": step}
        self._share_storage(first)
        self._share_cpus(world, first)
        self._trouble(world)
        self._add_cluster(world, first)
        seconds = self._seconds(world, first)
        self._bound_rare_batches(world, work, seconds)
        self._pause(world, seconds)
        self._warm_cache(first, seconds)
        phases = [first, *self._changes(first, seconds)]
        config = self._config()
        self._limit_memory(world, phases, config)
        entry = {"name": name, "why": ", ".join(self._told) or "nothing special", "seconds": seconds, "world": world}
        return {**entry, "phases": phases, "config": config, "memory_grace_s": seconds / 4 if len(phases) > 1 else 0.0}

    def _happens(self, probability: float, what: str) -> bool:
        if self._rng.random() >= probability:
            return False
        self._told.append(what)
        return True

    # -- the machine ---------------------------------------------------------------------------------------------------

    def _world(self) -> dict[str, Any]:
        rng = self._rng
        world: dict[str, Any] = {
            "cpus": rng.choice(_CPUS),
            "own_s": _log_uniform(rng, 2e-4, 1e-3),
            "fork_s": _log_uniform(rng, 0.01, 0.3),
            "worker_bytes": _log_uniform(rng, 2e7, 1e9),
            "memory": 1e12,
            "noise": rng.choice((0.0, 0.01, 0.03)),
            "seed": rng.randrange(10**6),
        }
        if world["cpus"] >= 8 and self._happens(0.1, "ranks"):
            world["ranks"] = rng.choice((2, 4))
        if self._happens(0.25, "hyper-threads"):
            world["smt_yield"] = rng.uniform(0.1, 0.4)
        if self._happens(0.15, "memory contention"):
            world["thrash"] = _log_uniform(rng, 0.002, 0.05)
        if self._happens(0.15, "clock of 10 ms"):
            world["tick_s"] = 0.01
        if self._happens(0.2, "no run queue"):
            world["knows_queue"] = False
        return world

    def _share_cpus(self, world: dict[str, Any], first: dict[str, Any]) -> None:
        if self._happens(0.2, "others"):
            first["others"] = self._rng.uniform(0.1, 0.6) * world["cpus"]
        if self._happens(0.15, "bursts of others"):
            on_s, off_s = _log_uniform(self._rng, 1.0, 15.0), _log_uniform(self._rng, 2.0, 40.0)
            world["bursts"] = {"cpus": self._rng.uniform(0.2, 1.0) * world["cpus"], "on_s": on_s, "off_s": off_s}

    def _trouble(self, world: dict[str, Any]) -> None:
        rng = self._rng
        if self._happens(0.12, "slow spells"):
            world["slow"] = {
                "share": rng.uniform(0.05, 0.4),
                "factor": rng.uniform(1.5, 6.0),
                "seconds": _log_uniform(rng, 1.0, 20.0),
                "remote": rng.random() < 0.4,
                "together": rng.choice((1, 1, 2, 4)),
            }

    def _pause(self, world: dict[str, Any], seconds: float) -> None:
        if self._happens(0.15, "pauses"):
            every_s = seconds / self._rng.uniform(1.5, 8.0)
            pause_s = every_s * _log_uniform(self._rng, 0.01, 0.3)
            world["pauses"] = {"every_s": every_s, "seconds": pause_s, "stops_all": self._rng.random() < 0.3}

    def _add_cluster(self, world: dict[str, Any], first: dict[str, Any]) -> None:
        rng = self._rng
        if self._happens(0.3, "cluster"):
            world["actor_s"] = rng.uniform(0.5, 3.0)
            world["rtt_s"] = _log_uniform(rng, 3e-4, 5e-3)
            first["nodes"] = round(_log_uniform(rng, 1, 64)) * int(world.get("ranks", 1))
            first["link"] = _log_uniform(rng, 1e8, 1e10)

    def _limit_memory(self, world: dict[str, Any], phases: list[dict[str, Any]], config: dict[str, Any]) -> None:
        """So much that the cold start fits, at least."""
        if self._happens(0.2, "tight memory"):
            ranks = int(world.get("ranks", 1))
            workers = max(4, config.get("min_local", 0))
            most_bytes = max(phase["work"]["batch_bytes"] for phase in phases if "work" in phase)
            needed = ranks * (workers * world["worker_bytes"] + 2 * workers * most_bytes)
            world["memory"] = needed * _log_uniform(self._rng, 1.1, 6.0)

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {}
        if self._happens(0.15, "limits"):
            kind = self._rng.choice(("max_local", "max_prefetch", "min_local", "max_remote"))
            config[kind] = self._rng.randint(*{"max_prefetch": (2, 64), "min_local": (1, 4)}.get(kind, (1, 12)))
        return config

    # -- the work ------------------------------------------------------------------------------------------------------

    def _work(self) -> dict[str, Any]:
        rng = self._rng
        total_s = _log_uniform(rng, 1e-4, 10.0)
        kind = rng.choice(("computes", "waits", "both"))
        self._told.append(kind)
        waiting = {"computes": 0.0, "waits": rng.uniform(0.9, 0.999), "both": rng.uniform(0.1, 0.9)}[kind]
        work: dict[str, Any] = {"wait_s": waiting * total_s, "cpu_s": (1.0 - waiting) * total_s}
        work["encode_s"] = work["cpu_s"] * _log_uniform(rng, 0.003, 0.3)
        work["batch_bytes"] = _log_uniform(rng, 1e4, 1e8)
        if rng.random() < 0.6:
            work["spread"] = rng.uniform(0.05, 1.0)
            if self._happens(0.4, "correlated"):
                work["correlation"] = _log_uniform(rng, 5.0, 200.0)
        if self._happens(0.12, "rare slow batches"):
            work |= {"rare": rng.uniform(0.002, 0.03), "rare_factor": _log_uniform(rng, 3.0, 30.0)}
        if self._happens(0.12, "slow shards"):
            share, factor = rng.uniform(0.1, 0.5), rng.uniform(1.5, 5.0)
            work["shards"] = {"share": share, "factor": factor, "batches": _log_uniform(rng, 20.0, 500.0)}
        return work

    def _step(self, work: dict[str, Any]) -> dict[str, Any]:
        rng = self._rng
        if self._happens(0.15, "no step"):
            return {}
        total_s = _total_s(work)
        step_s = min(_MOST_STEP_S, total_s * _log_uniform(rng, 0.01, 3.0) / _log_uniform(rng, 1.0, 32.0))
        cpu = rng.choice((0.0, rng.uniform(0.0, 0.5)))
        return {"gpu_s": step_s * (1 - cpu), "cpu_s": step_s * cpu, "spread": rng.choice((0.0, rng.uniform(0.0, 0.6)))}

    def _share_storage(self, first: dict[str, Any]) -> None:
        """Of the waiting, a part is reading from a station that so many readers fill."""
        work = first["work"]
        if work["wait_s"] and self._happens(0.25, "shared storage"):
            reading_s = work["wait_s"] * self._rng.uniform(0.3, 1.0)
            work["wait_s"] -= reading_s
            work["read"] = 1.0
            readers, loss = _log_uniform(self._rng, 1.0, 64.0), self._rng.choice((0.0, 0.0, 0.01, 0.03))
            first["storage"] = {"capacity": readers / reading_s, "reader": 1.0 / reading_s, "loss": loss}

    def _warm_cache(self, first: dict[str, Any], seconds: float) -> None:
        work = first["work"]
        if work["wait_s"] > 0.2 * work["cpu_s"] and self._happens(0.15, "page cache"):
            batches = max(10, round(seconds * self._rng.uniform(0.1, 0.8) * self._rate))
            warm, gradual = self._rng.uniform(0.0, 0.3), self._rng.random() < 0.5
            work["cache"] = {"batches": batches, "warm": warm, "is_gradual": gradual}

    @staticmethod
    def _bound_rare_batches(world: dict[str, Any], work: dict[str, Any], seconds: float) -> None:
        """No batch takes so long that its end alone decides what was delivered by when."""
        if "rare" in work:
            slow = world["slow"]["factor"] if "slow" in world else 1.0
            work["rare_factor"] = max(1.0, min(work["rare_factor"], seconds / _RARE / _total_s(work) / slow))

    # -- time ----------------------------------------------------------------------------------------------------------

    def _seconds(self, world: dict[str, Any], first: dict[str, Any]) -> float:
        self._rate = _good_rate(world, first)
        longest_s = max(_LONG_S, min(_LONGEST_S, _LEAST_BATCHES / self._rate))
        fast_s = min(max(_SHORTEST_S, _BATCHES / self._rate), longest_s)
        return round(float(max(fast_s, min(_LONGEST_S, _LEAST_SERVICES * _service_s(first)))), 1)

    def _changes(self, first: dict[str, Any], seconds: float) -> list[dict[str, Any]]:
        """What is another from half-way on."""
        rng = self._rng
        if seconds < _LEAST_CHANGED_S or not self._happens(0.3, "changes"):
            return []
        factor = _log_uniform(rng, 1.5, 6.0) ** rng.choice((-1, 1))
        phase: dict[str, Any] = {"at": round(seconds / 2, 1)}
        kind = rng.choice(("work", "step", "nodes" if "nodes" in first else "work"))
        if kind == "work":
            phase["work"] = {**first["work"], **{part: first["work"][part] * factor for part in ("wait_s", "cpu_s")}}
        elif kind == "step" and first["step"]:
            times = {part: min(_MOST_STEP_S, first["step"][part] * factor) for part in ("gpu_s", "cpu_s")}
            phase["step"] = {**first["step"], **times}
        elif kind == "nodes":
            phase["nodes"] = round(first["nodes"] * rng.uniform(0.0, 1.5))
        return [phase]
