"""Divides the CPUs of a machine among the ranks of a job that run on it, by need. PURE.

Ranks of a data-parallel job take a step together, so one that loads slowly holds up all, and the others seem to lack
nothing: they wait for it in the all-reduce, which no clock tells from a step. What counts is therefore the worst wait
of the job. A rank needs the CPUs with which it makes batches, and trains on them, at the rate that the job would have
if nobody waited for data. All wait for the same share of that if CPUs are divided in proportion
(`dpex.schedule.fair_shares`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dpex.schedule.fair_shares import Claim, fair_shares

UNIT_CPUS = 0.1
"""CPUs are divided in such parts: finer ones would be within the error of what is measured."""
LEAST_CPUS = 0.5
"""Of a rank, whatever it needs: its training thread has to run."""
MOST_WAIT = 0.9
"""A loop that waits for more of its time needs ten times its rate at least; by how much more, nobody can tell."""
ALIKE = 0.1
"""Ranks whose rates differ by less than this part take their steps together."""


@dataclass(frozen=True, kw_only=True)
class RankLoad:
    """What a rank told of itself.

    Attributes:
        cpu_s: CPU seconds per batch, of the training process and its local workers.
        rate: Batches per second.
        wait: The share of its time that is lost to loading, 0 to 1.
        used: CPUs that it keeps busy.
    """

    cpu_s: float = 0.0
    rate: float = 0.0
    wait: float = 0.0
    used: float = 0.0

    def plus(self, other: RankLoad) -> RankLoad:
        """Of two loaders of one rank: the CPUs of both, by the rate of the faster."""
        first, second = sorted((self, other), key=lambda load: -load.rate)
        both_s = first.cpu_s + second.cpu_s * second.rate / first.rate if first.rate > 0 else 0.0
        return RankLoad(cpu_s=both_s, rate=first.rate, wait=max(self.wait, other.wait), used=max(self.used, other.used))


def need(load: RankLoad, ranks: Mapping[str, RankLoad]) -> float:
    """CPUs with which this rank would keep up with the job if nobody waited for data."""
    together = [other.wait for other in ranks.values() if abs(other.rate - load.rate) <= ALIKE * load.rate]
    wait = min(MOST_WAIT, max([load.wait, *together]))
    return load.cpu_s * load.rate / (1.0 - wait)


def divided(total: float, ranks: int, loads: Mapping[str, RankLoad]) -> dict[str, float]:
    """CPUs for each of the ranks that told of themselves; the others of ``ranks`` have an equal part each."""
    if not loads:
        return {}
    each = total / max(ranks, len(loads))
    least = min(LEAST_CPUS, each)
    units = math.floor(len(loads) * (each - least) / UNIT_CPUS + 1e-9)
    claims = {
        name: Claim(need=max(0.0, need(load, loads) - least) / UNIT_CPUS, most=units) for name, load in loads.items()
    }
    shares = fair_shares(units, claims)
    return {name: least + UNIT_CPUS * share for name, share in shares.items()}
