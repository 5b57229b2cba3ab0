"""What is known of the work, and what any setting would make of it.

Two steps. The *fluid* step finds rates: who wants a CPU gets an equal part, so with more demand than CPUs everything
that needs one takes κ times as long, and κ is where demand meets supply. The *replay* step then plays measured service
times through an ordered window of the given depth, as closed queueing formulas mislead once service times are spread.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from dpex.autotune.types import Settings

_REPLAYED = 600
_SLOWEST = 64.0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds per batch, unless said otherwise.

    step_s: the consumer between two calls; step_cpu_s: its CPU in that. own_s: CPU of the consumer per batch that comes
    from a worker. here_s: making one in the training process.
    cpu_s, wait_s: a local worker's CPU, and its waiting for anything but a CPU. far_s: a remote worker's time.
    spread: measured service times divided by their mean. cpus: free of others' work. ceiling, far_ceiling: batches per
    second that all workers, and remote ones, were seen unable to surpass.
    """

    step_s: float
    step_cpu_s: float
    own_s: float
    here_s: float
    cpu_s: float
    wait_s: float
    far_s: float
    spread: Sequence[float] = (1.0,)
    cpus: float = 1.0
    ceiling: float = float("inf")
    far_ceiling: float = float("inf")


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Rates without regard to depth. demand: batches per second if none were waited for. capacity: what workers make.

    slowdown: κ, how many times longer CPU work takes than on an idle machine.
    """

    demand: float
    capacity: float
    slowdown: float

    @property
    def rate(self) -> float:
        """Batches per second."""
        return min(self.demand, self.capacity)


def fluid(work: Estimate, settings: Settings) -> Flow:
    """Rates under a setting, at the κ where the demand for CPUs meets their number."""
    if not settings.workers:
        rate = 1.0 / max(1e-9, work.step_s + work.here_s)
        return Flow(demand=rate, capacity=rate, slowdown=1.0)
    low, high = 1.0, _SLOWEST
    flow, wanted = _balance(work, settings, low)
    if wanted <= work.cpus:
        return flow
    for _ in range(24):
        if high - low < 1e-3 * high:
            break
        middle = (low + high) / 2
        if _balance(work, settings, middle)[1] > work.cpus:
            low = middle
        else:
            high = middle
    return _balance(work, settings, high)[0]


def _balance(work: Estimate, settings: Settings, slowdown: float) -> tuple[Flow, float]:
    """Rates where workers' CPU work takes ``slowdown`` times as long, and the CPUs that everybody wants then.

    The consumer comes as one more to those who are at it, so it may be slowed even where workers are not.
    """
    local, remote = _capacities(work, settings, slowdown)
    capacity = local + remote
    own_cpu = work.step_cpu_s + work.own_s
    crowding, demand, rate = slowdown, 0.0, 0.0
    for _ in range(3):
        demand = 1.0 / max(1e-9, work.step_s + work.own_s + (crowding - 1.0) * own_cpu)
        rate = min(demand, capacity)
        at_it = rate * local / max(1e-12, capacity) * work.cpu_s * slowdown
        crowding = max(slowdown, (at_it + 1.0) / work.cpus)
    near = min(local, rate * local / max(1e-12, capacity))
    return Flow(demand=demand, capacity=capacity, slowdown=slowdown), near * work.cpu_s + rate * own_cpu


def _capacities(work: Estimate, settings: Settings, slowdown: float) -> tuple[float, float]:
    local = settings.local / max(1e-9, work.wait_s + work.cpu_s * slowdown)
    remote = min(settings.remote / max(1e-9, work.far_s), work.far_ceiling)
    over = (local + remote) / work.ceiling
    return (local, remote) if over <= 1.0 else (local / over, remote / over)


def replay(work: Estimate, settings: Settings, flow: Flow) -> float:
    """Batches per second when measured service times are played through the window, in order."""
    if not settings.workers:
        return flow.rate
    near_s = work.wait_s + work.cpu_s * flow.slowdown
    spread = list(work.spread) or [1.0]
    random.Random(0).shuffle(spread)
    mean = sum(spread) / len(spread) or 1.0
    count = max(_REPLAYED, 6 * settings.depth, 4 * settings.workers)
    free = [(0.0, number < settings.local) for number in range(settings.workers)]
    heapq.heapify(free)
    delivered = [0.0] * count
    consumer = link = 0.0
    period = 1.0 / flow.demand
    half, half_at = count // 2, 0.0
    for number in range(count):
        at, near = free[0]
        drawn = delivered[number - settings.depth] if number >= settings.depth else 0.0
        service = (near_s if near else work.far_s) * spread[number % len(spread)] / mean
        end = max(at, drawn) + service
        heapq.heapreplace(free, (end, near))
        if not near and math.isfinite(work.far_ceiling):
            link = end = max(link, end) + 1.0 / work.far_ceiling
        consumer = max(consumer + period, end)
        delivered[number] = consumer
        if number == half:
            half_at = consumer
    rate = (count - 1 - half) / max(1e-12, consumer - half_at)
    return min(rate, work.ceiling, flow.demand)
