"""Divides the workers that a cluster has room for among the loaders that want them. PURE.

A loader says how many workers it would need so that its training loop never waits, and what is made without them, by
the workers of its own machine, as a number of such workers. With ``n`` of ``need`` workers beside its ``own`` it waits
for ``1 - (n + own) / (need + own)`` of its time. `fair_shares` gives one worker after the other to the loader with the
smallest ``(n + own) / (weight * (need + own))``: no loader can wait less without one that waits as much or more waiting
longer (max-min fairness, by Adams' method of rounding: whoever has nothing comes first).

`ClusterShares` keeps who asked for what. Its state is soft: loaders report again every second, and one that does not is
forgotten, so a coordinator that was lost is replaced by an empty one.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import median

FORGOTTEN_S = 5.0
"""Seconds after which a loader that has not reported has no share: several of its reports, as one may be late."""
UNUSED_S = 6.0
"""Seconds for which a loader may leave a share unused before others have it, from when it last had more workers: the
tuner takes up to four seconds to see what those bring, and a window or two to ask for as many again."""
UNUSED_GROWTH = 1.25
"""A loader that left its share unused keeps what it has, and this much more, so that it can ask again."""
NEEDS = 5
"""A loader's share goes by the median of so many of its needs: of a loop that nearly always waits they vary greatly."""
SAME_NEED = 0.1
"""A median that is within this part of the need that shares go by does not change it: no worker moves for noise."""
CAPACITY_S = 5.0
"""The capacity is the most that was seen in so many seconds: a worker that was just asked for may be in no count for a
moment, and nobody shall lose one for that. One that leaves may be in two, but can be asked for only if it is free."""
DIVIDED_AT_ONCE = 1000
"""Up to so many workers, dividing them takes a millisecond: it is done with each report."""
DIVISION_S = 12e-6
"""More workers are divided at most once in so many seconds per worker, ten times what it takes: of a thousand loaders
on 30,000 CPUs each reports every second, and the coordinator has the rest of its time for them."""
_LEAST_NEED = 0.01
"""Needs below it are as good as none, and no divisor."""
_ROUNDING = 1e-9
"""Sums of CPUs in floating point that differ by less are equal."""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What one loader wants of the cluster.

    need: workers with which its training loop would never wait. own: what is made without any of them, as a number of
    workers. most: workers that it may have or could be placed, at
    most. weight: of its wait against others'. cpus: what a worker of its takes, in the unit of the capacity.
    requested: workers that it has asked for, running: those of them that are there.
    """

    need: float
    most: int
    weight: float = 1.0
    cpus: float = 1.0
    requested: int = 0
    running: int = 0
    own: float = 0.0

    @property
    def held(self) -> float:
        """What the workers take that it has asked for."""
        return self.requested * self.cpus

    @property
    def wait_share(self) -> float:
        """The part of its time that the training loop waits, 0 to 1."""
        whole = self.need + self.own
        return max(0.0, 1.0 - (self.running + self.own) / whole) if whole > 0 else 0.0


def fair_shares(capacity: float, claims: Mapping[str, Claim]) -> dict[str, int]:
    """Workers for each loader, of a capacity in the unit of `Claim.cpus`.

    What nobody needs is divided in the same proportion, so that everybody may try more; who needs none comes last.
    """
    shares = dict.fromkeys(claims, 0)
    queue = [(*_turn(claim, 0), -claim.running, name) for name, claim in claims.items() if claim.most > 0]
    heapq.heapify(queue)
    while queue:
        *_, tie, name = heapq.heappop(queue)
        claim = claims[name]
        if claim.cpus > capacity + _ROUNDING:
            continue
        capacity -= claim.cpus
        shares[name] += 1
        if shares[name] < claim.most:
            heapq.heappush(queue, (*_turn(claim, shares[name]), tie, name))
    return shares


def _turn(claim: Claim, workers: int) -> tuple[bool, float]:
    """The smallest of these is served next: who has less than it needs, and of these who waits longest."""
    whole = max(claim.need + claim.own, _LEAST_NEED)
    return workers >= claim.need, (workers + claim.own) / (claim.weight * whole)


@dataclass(eq=False, kw_only=True)
class _Loader:
    """A loader that has reported.

    needs: the latest, each with what is made without. need, own: those that its share goes by.
    unused_since: when it began to leave some of its share alone, or had more workers since.
    """

    claim: Claim
    seen_at: float
    needs: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=NEEDS))
    need: float = 0.0
    own: float = 0.0
    granted: int = 0
    unused_since: float | None = None
    is_held_back: bool = False

    def learn(self, need: float, own: float) -> None:
        """Take in what it needs now, and what is made without."""
        self.needs.append((need, own))
        usual, usual_own = (median(values) for values in zip(*self.needs, strict=True))
        if max(abs(usual - self.need), abs(usual_own - self.own)) > SAME_NEED * (self.need + self.own):
            self.need, self.own = usual, usual_own


@dataclass(eq=False, kw_only=True)
class ClusterShares:
    """See the module. Times are seconds of the coordinator's clock."""

    _loaders: dict[str, _Loader] = field(default_factory=dict)
    _capacities: deque[tuple[float, float]] = field(default_factory=deque)
    _held: float = 0.0
    _divided_at: float = -math.inf

    def report(self, name: str, claim: Claim, *, free: float, total: float, now: float) -> int:
        """Return how many workers this loader may have; none before the first division that it is part of.

        free: what is free on the cluster, in the unit of `Claim.cpus`. total: the same if nobody used any.
        """
        loader = self._loaders.get(name)
        if loader is None:
            loader = self._loaders[name] = _Loader(claim=claim, seen_at=now)
            self._held += claim.held
        self._held += claim.held - loader.claim.held
        before, loader.claim, loader.seen_at = loader.claim, claim, now
        loader.learn(claim.need, claim.own)
        self._note_capacity(free, total, now)
        self._notice_unused(loader, before, now)
        if self._is_due(now):
            self._divided_at = now
            self._forget(now)
            self._divide()
        return loader.granted

    def _is_due(self, now: float) -> bool:
        workers = max(self.capacity, len(self._loaders))
        return workers <= DIVIDED_AT_ONCE or now - self._divided_at >= workers * DIVISION_S

    def leave(self, name: str) -> None:
        """Forget a loader, at once."""
        loader = self._loaders.pop(name, None)
        self._held -= loader.claim.held if loader is not None else 0.0

    def claims(self) -> dict[str, tuple[Claim, int]]:
        """Who asked for what, and what they may have."""
        return {name: (loader.claim, loader.granted) for name, loader in self._loaders.items()}

    def _forget(self, now: float) -> None:
        for name in [name for name, loader in self._loaders.items() if now - loader.seen_at > FORGOTTEN_S]:
            del self._loaders[name]
        self._held = sum(loader.claim.held for loader in self._loaders.values())  # without the rounding of differences

    def _note_capacity(self, free: float, total: float, now: float) -> None:
        """Keep those that are the most of a time to come: they fall from the first to the last."""
        capacity, known = min(total, self._held + free), self._capacities
        while known and known[-1][1] <= capacity:
            known.pop()
        known.append((now, capacity))
        while now - known[0][0] > CAPACITY_S:
            known.popleft()

    @property
    def capacity(self) -> float:
        """What there is for all loaders together."""
        return self._capacities[0][1] if self._capacities else 0.0

    @staticmethod
    def _notice_unused(loader: _Loader, before: Claim, now: float) -> None:
        """Hold back a loader that has not asked for its share for a while, until it asks for more."""
        claim = loader.claim
        if claim.requested >= loader.granted:
            loader.unused_since, loader.is_held_back = None, False
        elif claim.requested > before.requested:
            loader.unused_since, loader.is_held_back = now, False
        elif claim.running > before.running or loader.unused_since is None:
            loader.unused_since = now
        elif now - loader.unused_since > UNUSED_S:
            loader.is_held_back = True

    def _divide(self) -> None:
        shares = fair_shares(self.capacity, {name: _wanted(loader) for name, loader in self._loaders.items()})
        for name, share in shares.items():
            self._loaders[name].granted = share


def _wanted(loader: _Loader) -> Claim:
    """Its claim, by the need that it is known for."""
    claim = replace(loader.claim, need=loader.need, own=loader.own)
    if not loader.is_held_back:
        return claim
    return replace(claim, most=min(claim.most, max(claim.requested + 1, int(claim.requested * UNUSED_GROWTH))))
