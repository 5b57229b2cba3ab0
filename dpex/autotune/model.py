"""What is known of the work, and what any setting would make of it.

Two steps. The *fluid* step finds rates: who wants a CPU gets an equal part of them, and who waits leaves it to others.
The *replay* step then plays measured service times through an ordered window of the given prefetch, as closed queueing
formulas know nothing of order and mislead once service times are spread.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import NormalDist
from typing import NamedTuple

from dpex.autotune.constants.measuring import MODEL
from dpex.autotune.correlation import in_correlated_order
from dpex.autotune.types import Settings

_ROUNDS = 3
"""The rates of workers and training loop depend on each other; so many rounds bring them together to a percent."""
_LARGE, _NOTHING = 1e100, 1e-9
"""Weights are kept below the first; those below this part of their sum are left out."""
_STEPS = 97
"""Steps that stand for the distribution of all."""


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Seconds per batch, unless said otherwise.

    step_s: the consumer between two calls; step_cpu_s: its CPU in that. own_s: CPU of the consumer per batch that comes
    from a worker. here_s: making one in the training process.
    cpu_s, wait_s: a local worker's CPU, and its waiting for anything but a CPU. at_once: CPUs that making a batch keeps
    busy at the same time while it computes, as libraries start threads of their own. far_s: a remote worker's time.
    travel_s: the way to it and back. spread: measured service times divided by their mean. step_spread: standard
    deviation of steps over their mean. correlation: over how many batches service times stay alike (see
    `dpex.autotune.correlation`), 0 if successive ones are independent. cpus: that we may use.
    others: how many of other people's programs want one of these. ceiling, far_ceiling: batches per second that all
    workers, and remote ones, were seen unable to surpass. seen: batches that all this rests on. hidden_s: of a step,
    the time in which the training loop has nothing to do as the GPU is still at work: so much of what it does in
    ``next()`` costs nothing.
    """

    step_s: float
    step_cpu_s: float
    own_s: float
    here_s: float
    cpu_s: float
    wait_s: float
    far_s: float
    travel_s: float = 0.0
    spread: Sequence[float] = (1.0,)
    step_spread: float = 0.0
    correlation: float = 0.0
    cpus: float = 1.0
    others: float = 0.0
    ceiling: float = float("inf")
    far_ceiling: float = float("inf")
    at_once: float = 1.0
    seen: float = float("inf")
    hidden_s: float = 0.0

    @property
    def computing_s(self) -> float:
        """Wall time of a local worker's CPU work on an idle machine."""
        return self.cpu_s / max(1.0, min(self.at_once, self.cpus))

    @property
    def waiting(self) -> float:
        """Share of a local worker's time that is not CPU."""
        return self.wait_s / max(1e-9, self.wait_s + self.cpu_s)

    @cached_property
    def services(self) -> Sequence[float]:
        """Service times over their mean, in an order as correlated as theirs; to be repeated."""
        factors = list(self.spread) or [1.0]
        if self.correlation >= MODEL.correlated and self.variation >= MODEL.even:
            factors = in_correlated_order(factors, self.correlation)
        else:
            random.Random(0).shuffle(factors)
        mean = sum(factors) / len(factors) or 1.0
        return [factor / mean for factor in factors]

    @cached_property
    def variation(self) -> float:
        """Standard deviation of service times over their mean."""
        mean = sum(self.spread) / len(self.spread) or 1.0
        return math.sqrt(sum((factor / mean - 1.0) ** 2 for factor in self.spread) / len(self.spread))


@dataclass(frozen=True, kw_only=True)
class Flow:
    """Rates without regard to prefetch. demand: batches per second if none were waited for. capacity: what workers
    make.

    slowdown: how many times longer CPU work of workers takes than on an idle machine.
    """

    demand: float
    capacity: float
    slowdown: float

    @property
    def rate(self) -> float:
        """Batches per second."""
        return min(self.demand, self.capacity)


def fluid(work: Estimate, settings: Settings) -> Flow:
    """Rates under a setting, where workers, the consumer and others share the CPUs."""
    if not settings.workers:
        crowding = max(1.0, (1.0 + work.others) / work.cpus)
        making = max(1.0, (max(1.0, min(work.at_once, work.cpus)) + work.others) / work.cpus)
        queued_s = (crowding - 1.0) * work.step_cpu_s + (making - 1.0) * min(work.here_s, work.computing_s)
        hidden_s = min(work.hidden_s, work.here_s + queued_s)
        rate = 1.0 / max(1e-9, work.step_s + work.here_s + queued_s - hidden_s)
        return Flow(demand=rate, capacity=rate, slowdown=crowding)
    own_cpu = work.step_cpu_s + work.own_s
    demand = 1.0 / max(1e-9, work.step_s + work.own_s - min(work.hidden_s, work.own_s))
    at_it, capacity, slowdown = min(1.0, demand * own_cpu), 0.0, 1.0
    for _ in range(_ROUNDS):
        near = _local(work, settings.local, at_it)
        far = min(settings.remote / max(1e-9, work.far_s), work.far_ceiling)
        capacity = min(near.rate + far, work.ceiling)
        share = min(1.0, demand / max(1e-12, near.rate + far), work.ceiling / max(1e-12, near.rate + far))
        crowding = max(1.0, (share * near.at_it + 1.0 + work.others) / work.cpus)
        hidden_s = min(work.hidden_s, work.own_s + (crowding - 1.0) * own_cpu)
        demand = 1.0 / max(1e-9, work.step_s + work.own_s + (crowding - 1.0) * own_cpu - hidden_s)
        at_it = min(1.0, min(demand, capacity) * own_cpu * crowding)
        slowdown = 1.0 + share * (near.slowdown - 1.0)
    return Flow(demand=demand, capacity=capacity, slowdown=slowdown)


class _Near(NamedTuple):
    """Local workers that never lack a ticket. at_it: how many CPUs they have or want, on average."""

    rate: float
    at_it: float
    slowdown: float


def _local(work: Estimate, workers: int, consumer: float) -> _Near:
    """A closed network of two stations: waiting, where nobody is in another's way, and the CPUs, shared equally among
    the workers there, ``consumer`` of a consumer and the others.

    Its steady state has product form whatever the distributions of the two times are (Baskett, Chandy, Muntz and
    Palacios, 1975): with n of N workers at the CPUs, which do r(n) of work per second together, it has weight
    Z^(N-n) / (N-n)! · D^n / (r(1)···r(n)). Each of them wants as many CPUs as its work keeps busy at once.
    """
    wait_s, cpu_s, each = work.wait_s, work.cpu_s, max(1.0, work.at_once)
    if not workers or cpu_s <= 1e-9:
        return _Near(workers / max(1e-9, wait_s + cpu_s), 0.0, 1.0)
    crowd = work.others + consumer
    cpus = work.cpus
    weight, total, working, there = 1.0, 0.0, 0.0, 0.0
    if wait_s > 1e-6 * cpu_s:
        total = 1.0
        for n in range(1, workers + 1):
            wanted = n * each
            speed = wanted * min(1.0, cpus / (wanted + crowd))
            weight *= (workers - n + 1) / wait_s * cpu_s / speed
            total += weight
            working += weight * speed
            there += weight * wanted
            if weight < _NOTHING * total:
                break  # past the peak: each weight is a smaller part of the one before it
            if total > _LARGE:
                weight, total, working, there = (x / _LARGE for x in (weight, total, working, there))
    else:
        wanted = workers * each
        total, working, there = 1.0, wanted * min(1.0, cpus / (wanted + crowd)), wanted
    return _Near(working / total / cpu_s, there / total, there / working)


def replay(work: Estimate, settings: Settings, flow: Flow) -> float:
    """Batches per second when measured service times are played through the window, in order."""
    if not settings.workers:
        return flow.rate
    near_s = work.wait_s + work.cpu_s / max(1.0, work.at_once) * flow.slowdown
    factors = work.services
    least, most = MODEL.replayed_if_even, MODEL.replayed_if_uneven
    count = max(int(least + (most - least) * min(1.0, work.variation)), 6 * settings.prefetch, 4 * settings.workers)
    if work.correlation >= MODEL.correlated:
        count = max(count, 2 * len(factors))  # a pass to get going, and one that counts
    free = [(0.0, number < settings.local) for number in range(settings.workers)]
    heapq.heapify(free)
    delivered = [0.0] * count
    consumer = link = 0.0
    period, far_period = 1.0 / flow.demand, 1.0 / work.far_ceiling
    half, half_at = count // 2, 0.0
    periods = _periods(period, work.step_spread)
    for number in range(count):
        at, near = free[0]
        drawn = delivered[number - settings.prefetch] if number >= settings.prefetch else 0.0
        service = (near_s if near else work.far_s) * factors[number % len(factors)]
        begun = max(at, drawn)
        free_at = end = begun + service
        if not near:
            end += work.travel_s
            if far_period:  # batches travel in the order in which they are made: a straggler keeps nobody off the link
                usual = begun + work.far_s + work.travel_s
                behind, link = link - usual, max(link, usual) + far_period
                end = max(end + far_period, link)
                free_at += max(0.0, behind - settings.remote * far_period)  # as many may wait there as have a worker
        heapq.heapreplace(free, (free_at, near))
        consumer = max(consumer + periods[number % len(periods)], end)
        delivered[number] = consumer
        if number == half:
            half_at = consumer
    rate = (count - 1 - half) / max(1e-12, consumer - half_at)
    return min(rate, work.ceiling, flow.demand)


def _periods(mean_s: float, spread: float) -> Sequence[float]:
    """Steps of that mean and relative spread, log-normal, as the lengths of sequences mostly are; in fixed disorder."""
    if spread < MODEL.even:
        return (mean_s,)
    sigma = math.sqrt(math.log(1.0 + spread * spread))
    normal = NormalDist()
    factors = [math.exp(sigma * normal.inv_cdf((i + 0.5) / _STEPS)) for i in range(_STEPS)]
    random.Random(1).shuffle(factors)
    return [mean_s * factor * _STEPS / sum(factors) for factor in factors]
