"""Who gets which part of a cluster: equal or by weight, within every limit, settled soon, and free of who has gone."""

from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.pools.ray.shares import CAPACITY_S, FORGOTTEN_S, Claim, ClusterShares, fair_shares


@pytest.mark.parametrize(
    ("capacity", "claims", "shares"),
    [
        pytest.param(8, {"a": Claim(useful=100, most=64)}, {"a": 8}, id="alone"),
        pytest.param(8, {"a": Claim(useful=9, most=64), "b": Claim(useful=90, most=64)}, {"a": 4, "b": 4}, id="equal"),
        pytest.param(
            12,
            {"a": Claim(useful=20, most=64, weight=2.0), "b": Claim(useful=20, most=64)},
            {"a": 8, "b": 4},
            id="weights",
        ),
        pytest.param(
            12,
            {"a": Claim(useful=2, most=64), "b": Claim(useful=20, most=64), "c": Claim(useful=20, most=64)},
            {"a": 2, "b": 5, "c": 5},
            id="what one has no use for goes to the others",
        ),
        pytest.param(12, {"a": Claim(useful=9, most=3), "b": Claim(useful=50, most=64)}, {"a": 3, "b": 9}, id="limit"),
        pytest.param(
            2,
            {"a": Claim(useful=500, most=64, weight=100.0), "b": Claim(useful=1, most=64)},
            {"a": 1, "b": 1},
            id="no hunger",
        ),
        pytest.param(
            12, {"a": Claim(useful=2, most=64), "b": Claim(useful=4, most=64)}, {"a": 6, "b": 6}, id="surplus"
        ),
        pytest.param(4, {"a": Claim(useful=0, most=64), "b": Claim(useful=9, most=64)}, {"a": 0, "b": 4}, id="no use"),
        pytest.param(4, {"a": Claim(useful=0, most=64)}, {"a": 4}, id="no use for what is free"),
        pytest.param(
            9,
            {"a": Claim(useful=9, most=64, cpus=2.0), "b": Claim(useful=9, most=64)},
            {"a": 2, "b": 5},
            id="workers of two CPUs",
        ),
        pytest.param(0, {"a": Claim(useful=9, most=64)}, {"a": 0}, id="nothing there"),
        pytest.param(5, {}, {}, id="no loader"),
    ],
)
def test_shares(capacity: float, claims: dict[str, Claim], shares: dict[str, int]) -> None:
    assert fair_shares(capacity, claims) == shares


claims = st.builds(
    Claim, useful=st.integers(0, 60), most=st.integers(0, 40), weight=st.floats(0.1, 10), running=st.integers(0, 40)
)


@given(st.integers(0, 100), st.dictionaries(st.text(max_size=2), claims, max_size=8))
def test_no_loader_could_have_more_without_one_that_has_less(capacity: int, wanted: dict[str, Claim]) -> None:
    shares = fair_shares(capacity, wanted)
    assert all(0 <= shares[name] <= claim.most for name, claim in wanted.items())
    assert sum(shares.values()) == min(capacity, sum(claim.most for claim in wanted.values()))
    for poor, claim in wanted.items():
        if shares[poor] < min(claim.most, claim.useful):
            for rich in wanted:
                if shares[rich] > 0:
                    assert shares[rich] <= wanted[rich].useful
                    assert (shares[rich] - 1) / wanted[rich].weight <= shares[poor] / claim.weight


@dataclass(kw_only=True)
class Job:
    """A training whose loop would take ``demand`` batches a second of workers that make ``rate`` each.

    It asks as the law does: for at most twice as many workers at a time, every so many seconds, and for no more than
    ``limit``.
    """

    demand: float
    rate: float
    limit: int = 1000
    every: int = 2
    weight: float = 1.0
    workers: int = 0
    history: list[int] = field(default_factory=list)

    @property
    def claim(self) -> Claim:
        """What it reports; its estimate of what is useful goes up and down by 4 %."""
        noise = 1.04 if len(self.history) % 2 else 0.96
        useful = round(self.demand / self.rate * noise)
        return Claim(useful=useful, most=64, weight=self.weight, requested=self.workers, running=self.workers)

    def follow(self, granted: int, second: int) -> None:
        """Take one second's answer."""
        if granted < self.workers:
            self.workers = granted
        elif second % self.every == self.every - 1:
            wanted = min(self.limit, round(self.demand / self.rate * 1.05), max(2, 2 * self.workers))
            self.workers = min(granted, max(self.workers, wanted))
        self.history.append(self.workers)


def run(jobs: dict[str, Job], capacity: int, seconds: range, shares: ClusterShares) -> None:
    """Every job reports once a second; workers that one gives back are free for the next."""
    for second in seconds:
        for number, (name, job) in enumerate(jobs.items()):
            free = capacity - sum(other.workers for other in jobs.values())
            now = second + number / len(jobs)
            granted = shares.report(name, job.claim, free=max(0, free), total=capacity, now=now)
            job.follow(min(granted, job.workers + max(0, free)), second)


def test_two_jobs_that_want_all_get_equal_shares_in_ten_seconds() -> None:
    shares = ClusterShares()
    first = Job(demand=100, rate=2)
    run({"first": first}, 16, range(20), shares)
    assert first.workers == 16
    both = {"first": first, "second": Job(demand=50, rate=2)}
    run(both, 16, range(20, 30), shares)
    assert [job.workers for job in both.values()] == [8, 8]
    run(both, 16, range(30, 50), ClusterShares())
    assert {tuple(job.history[-20:]) for job in both.values()} == {(8,) * 20}, "not even when the actor is a new one"


def test_a_share_that_is_of_no_use_goes_to_others() -> None:
    """One cannot use more than three, a slow storage say, though its loop waits."""
    jobs = {"stuck": Job(demand=100, rate=1, limit=3), "hungry": Job(demand=100, rate=1)}
    run(jobs, 20, range(22), ClusterShares())
    assert (jobs["stuck"].workers, jobs["hungry"].workers) == (3, 13)


def test_who_has_gone_holds_nothing() -> None:
    shares = ClusterShares()
    jobs = {"first": Job(demand=100, rate=2), "second": Job(demand=100, rate=2)}
    run(jobs, 16, range(20), shares)
    del jobs["second"]
    run(jobs, 16, range(20, 22 + int(FORGOTTEN_S)), shares)
    assert jobs["first"].workers == 16
    jobs["third"] = Job(demand=100, rate=2)
    run(jobs, 16, range(40, 50), shares)
    assert list(shares.claims()) == ["first", "third"]


def test_the_capacity_is_the_most_of_the_latest_seconds() -> None:
    shares = ClusterShares()
    claim = Claim(useful=9, most=9)
    assert shares.report("a", claim, free=6, total=30, now=0.0) == 6
    assert shares.report("a", claim, free=2, total=30, now=1.0) == 6
    assert shares.report("a", claim, free=40, total=5, now=2.0) == 6
    assert shares.report("a", claim, free=2, total=30, now=CAPACITY_S + 1.5) == 5
