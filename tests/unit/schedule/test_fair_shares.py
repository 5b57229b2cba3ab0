"""Who gets which part of a cluster: fair by wait, within every limit, settled soon, and free of who has gone."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.schedule.fair_shares import (
    CAPACITY_S,
    DIVIDED_AT_ONCE,
    DIVISION_S,
    FORGOTTEN_S,
    UNUSED_S,
    Claim,
    ClusterShares,
    fair_shares,
)


@pytest.mark.parametrize(
    ("capacity", "claims", "shares"),
    [
        pytest.param(8, {"a": Claim(need=100, most=64)}, {"a": 8}, id="alone"),
        pytest.param(8, {"a": Claim(need=9, most=64), "b": Claim(need=9, most=64)}, {"a": 4, "b": 4}, id="equal needs"),
        pytest.param(
            12, {"a": Claim(need=10, most=64), "b": Claim(need=20, most=64)}, {"a": 4, "b": 8}, id="equal waits"
        ),
        pytest.param(
            12,
            {"a": Claim(need=10, most=64, weight=2.0), "b": Claim(need=20, most=64)},
            {"a": 6, "b": 6},
            id="weights",
        ),
        pytest.param(12, {"a": Claim(need=50, most=3), "b": Claim(need=50, most=64)}, {"a": 3, "b": 9}, id="a limit"),
        pytest.param(2, {"a": Claim(need=500, most=64), "b": Claim(need=1, most=64)}, {"a": 1, "b": 1}, id="no hunger"),
        pytest.param(
            12, {"a": Claim(need=2, most=64), "b": Claim(need=4, most=64)}, {"a": 4, "b": 8}, id="more than is needed"
        ),
        pytest.param(4, {"a": Claim(need=0, most=64), "b": Claim(need=9, most=64)}, {"a": 0, "b": 4}, id="no need"),
        pytest.param(4, {"a": Claim(need=0, most=64)}, {"a": 4}, id="no need of what is free"),
        pytest.param(
            9,
            {"a": Claim(need=9, most=64, cpus=2.0), "b": Claim(need=9, most=64)},
            {"a": 3, "b": 3},
            id="workers of two CPUs",
        ),
        pytest.param(
            12,
            {"a": Claim(need=10, own=10, most=64), "b": Claim(need=20, most=64)},
            {"a": 1, "b": 11},
            id="one makes half by itself",
        ),
        pytest.param(0, {"a": Claim(need=9, most=64)}, {"a": 0}, id="nothing there"),
        pytest.param(5, {}, {}, id="nobody"),
    ],
)
def test_shares(capacity: float, claims: dict[str, Claim], shares: dict[str, int]) -> None:
    assert fair_shares(capacity, claims) == shares


claims = st.builds(
    Claim,
    need=st.floats(0, 1e4),
    most=st.integers(0, 40),
    weight=st.floats(0.1, 10),
    cpus=st.just(1.0),
    running=st.integers(0, 40),
    own=st.floats(0, 100),
)


@given(st.integers(0, 100), st.dictionaries(st.text(max_size=2), claims, max_size=8))
def test_nobody_could_wait_less_without_one_that_waits_more(capacity: int, wanted: dict[str, Claim]) -> None:
    shares = fair_shares(capacity, wanted)
    assert all(0 <= shares[name] <= claim.most for name, claim in wanted.items())
    assert sum(shares.values()) == min(capacity, sum(claim.most for claim in wanted.values()))

    def level(name: str, workers: int) -> float:
        claim = wanted[name]
        return (workers + claim.own) / (claim.weight * max(claim.need + claim.own, 0.01))

    for poor, claim in wanted.items():
        if shares[poor] < min(claim.most, claim.need):
            for rich in wanted:
                if shares[rich] > 0:
                    assert level(rich, shares[rich] - 1) <= level(poor, shares[poor])


@dataclass(kw_only=True)
class Job:
    """A training whose loop would take ``demand`` batches a second of workers that make ``rate`` each.

    It asks as the controller does: for at most twice as many workers at a time, every so many seconds, and for no more
    than ``useful``.
    """

    demand: float
    rate: float
    useful: int = 1000
    every: int = 2
    weight: float = 1.0
    workers: int = 0
    waits: list[float] = field(default_factory=list)

    def claim(self, rng: random.Random) -> Claim:
        made = min(self.demand, self.workers * self.rate)
        lost = 1.0 - made / self.demand
        noise = rng.uniform(0.95, 1.05)
        need = self.workers + (self.demand - made) / self.rate * noise if lost > 0.01 else float(self.workers)
        return Claim(need=need, most=64, weight=self.weight, requested=self.workers, running=self.workers)

    def follow(self, granted: int, second: int) -> None:
        if granted < self.workers:
            self.workers = granted
        elif second % self.every == self.every - 1:
            wanted = min(self.useful, round(self.demand / self.rate * 1.05), max(2, 2 * self.workers))
            self.workers = min(granted, max(self.workers, wanted))
        self.waits.append(max(0.0, 1.0 - self.workers * self.rate / self.demand))


def run(jobs: dict[str, Job], capacity: int, seconds: range, shares: ClusterShares) -> None:
    """Every job reports once a second; workers that one gives back are free for the next."""
    rng = random.Random(seconds.start)
    for second in seconds:
        for number, (name, job) in enumerate(jobs.items()):
            free = capacity - sum(other.workers for other in jobs.values())
            now = second + number / len(jobs)
            granted = shares.report(name, job.claim(rng), free=max(0, free), total=capacity, now=now)
            job.follow(min(granted, job.workers + max(0, free)), second)


def test_two_that_want_everything_wait_equally_within_ten_seconds() -> None:
    shares = ClusterShares()
    first = Job(demand=100, rate=2)
    run({"first": first}, 16, range(20), shares)
    assert first.workers == 16
    both = {"first": first, "second": Job(demand=100, rate=2)}
    run(both, 16, range(20, 30), shares)
    assert [job.workers for job in both.values()] == [8, 8]
    run(both, 16, range(30, 60), shares)
    assert {tuple(job.waits[-30:]) for job in both.values()} == {(0.84,) * 30}  # and nothing moves any more


def test_twenty_jobs_of_different_needs_wait_equally() -> None:
    rng = random.Random(7)
    jobs = {f"job {k}": Job(demand=rng.uniform(20, 200), rate=rng.uniform(1, 8)) for k in range(20)}
    shares = ClusterShares()
    run(jobs, 150, range(10), shares)
    run(jobs, 150, range(10, 40), shares)
    assert sum(job.workers for job in jobs.values()) == 150
    for job in jobs.values():
        one = job.rate / job.demand
        average = sum(other.waits[-1] for other in jobs.values()) / 20
        assert abs(job.waits[-1] - average) <= one + 0.1  # a worker, and what needs may differ unnoticed
        assert job.workers >= 1
    changes = sum(before != after for job in jobs.values() for before, after in pairwise(job.waits[-20:]))
    assert changes <= 10  # of 380: needs are noisy


def test_a_share_that_is_of_no_use_goes_to_others() -> None:
    """One cannot use more than three, a slow storage say, though its loop waits."""
    jobs = {"stuck": Job(demand=100, rate=1, useful=3), "hungry": Job(demand=100, rate=1)}
    run(jobs, 20, range(int(UNUSED_S) + 16), ClusterShares())
    assert (jobs["stuck"].workers, jobs["hungry"].workers) == (3, 16)


def test_who_takes_its_share_in_steps_keeps_it_meanwhile() -> None:
    """The other has everything, and gives back what the new one is granted."""
    jobs = {"there": Job(demand=1000, rate=1, workers=64)}
    shares = ClusterShares()
    run(jobs, 64, range(5), shares)
    jobs["new"] = Job(demand=1000, rate=1, every=5)
    run(jobs, 64, range(5, 35), shares)
    assert [job.workers for job in jobs.values()] == [32, 32]


def test_who_has_gone_holds_nothing() -> None:
    shares = ClusterShares()
    jobs = {"first": Job(demand=100, rate=2), "second": Job(demand=100, rate=2)}
    run(jobs, 16, range(20), shares)
    del jobs["second"]
    run(jobs, 16, range(20, 22 + int(FORGOTTEN_S)), shares)
    assert jobs["first"].workers == 16
    jobs["third"] = Job(demand=100, rate=2)
    run(jobs, 16, range(40, 50), shares)
    shares.leave("first")
    assert list(shares.claims()) == ["third"]


def test_a_coordinator_that_begins_anew_takes_nothing_away() -> None:
    jobs = {"first": Job(demand=100, rate=2), "second": Job(demand=100, rate=2)}
    run(jobs, 16, range(20), ClusterShares())
    run(jobs, 16, range(20, 30), ClusterShares())
    assert [job.workers for job in jobs.values()] == [8, 8]


def test_a_large_cluster_is_divided_as_often_as_that_pays() -> None:
    shares, capacity = ClusterShares(), 10 * DIVIDED_AT_ONCE
    pause_s = capacity * DIVISION_S

    def ask(name: str, now: float) -> int:
        return shares.report(name, Claim(need=1e6, most=capacity), free=capacity, total=capacity, now=now)

    assert ask("first", 0.0) == capacity
    assert ask("second", 0.5 * pause_s) == 0
    assert ask("first", 0.9 * pause_s) == capacity
    assert ask("second", 1.1 * pause_s) == capacity / 2
    assert ask("first", 1.2 * pause_s) == capacity / 2


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 9), st.floats(0.0, 4.0), st.integers(0, 40))))
def test_the_capacity_is_the_most_of_the_latest_seconds(reports: list[tuple[str, int, float, int]]) -> None:
    shares, now = ClusterShares(), 0.0
    seen: list[tuple[float, int]] = []
    held: dict[str, tuple[int, float]] = {}
    for name, requested, later, free in reports:
        now += later
        shares.report(name, Claim(need=1.0, most=9, requested=requested), free=free, total=30, now=now)
        held[name] = requested, now
        seen.append((now, min(30, sum(workers for workers, _ in held.values()) + free)))
        held = {other: told for other, told in held.items() if now - told[1] <= FORGOTTEN_S}
        assert shares.capacity == max(capacity for at, capacity in seen if now - at <= CAPACITY_S)
        assert shares.claims().keys() == held.keys()
