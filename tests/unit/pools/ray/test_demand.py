"""When a cluster is asked to grow, and when what was asked for goes back: a table of looks, one a second."""

from typing import Any

import pytest

from dpex.pools.ray.demand import LACKING_S, NODE_S, PAUSE_S, SPARE_S, UNTAKEN_S, Demand, DemandChange, Places

NOTHING = DemandChange()


class Cluster:
    """Does what a demand says; ``held`` and ``awaited`` are the places that follow."""

    def __init__(self) -> None:
        self.demand = Demand()
        self.now = 100.0
        self.held = self.awaited = 0
        self.told: list[str] = []

    def look(self, useful: int | None, requested: int = 0, free: int = 0) -> DemandChange:
        places = Places(useful=useful, requested=requested, free=free, held=self.held, awaited=self.awaited)
        change = self.demand.look(places, self.now)
        self.held -= change.held
        self.awaited += change.ask - change.awaited
        assert min(self.held, self.awaited) >= 0
        self.told += [change.message] if change.message else []
        self.now += 1.0
        return change

    def pass_by(self, seconds: float, useful: int | None, **seen: Any) -> list[DemandChange]:
        """All that was said meanwhile, but for nothing."""
        changes = [self.look(useful, **seen) for _ in range(int(seconds) + 1)]
        return [change for change in changes if change != NOTHING]

    def come(self, count: int) -> None:
        self.held, self.awaited = self.held + count, self.awaited - count


@pytest.fixture
def cluster() -> Cluster:
    return Cluster()


def test_what_the_cluster_lacks_is_asked_for_once_it_has_lasted(cluster: Cluster) -> None:
    assert cluster.pass_by(LACKING_S - 2, 6, requested=2, free=1) == []
    cluster.look(5, requested=2, free=1)
    (change,) = cluster.pass_by(LACKING_S, 7, requested=2, free=1)
    assert (change.ask, cluster.awaited) == (2, 2)  # the least of what was lacking meanwhile
    assert change.message.startswith("Asked the cluster for 2 places for workers beyond its size")


@pytest.mark.parametrize(
    ("useful", "requested", "free"), [(None, 0, 0), (0, 0, 0), (4, 4, 0), (4, 2, 2), (4, 0, 9), (1, 3, 0)]
)
def test_nothing_is_asked_for_where_there_is_room_or_no_use(
    cluster: Cluster, useful: int | None, requested: int, free: int
) -> None:
    assert cluster.pass_by(60, useful, requested=requested, free=free) == []


def test_a_need_that_comes_and_goes_asks_for_nothing(cluster: Cluster) -> None:
    for _ in range(10):
        assert cluster.pass_by(LACKING_S - 1, 6) == []
        assert cluster.look(0) == NOTHING


def test_places_that_came_are_kept_until_they_are_taken(cluster: Cluster) -> None:
    cluster.pass_by(LACKING_S, 4)
    cluster.come(4)
    assert cluster.pass_by(UNTAKEN_S - 5, 4) == []
    assert cluster.look(4, requested=3) == DemandChange(held=3)
    assert cluster.pass_by(UNTAKEN_S - 5, 4, requested=3) == []
    assert cluster.look(4, requested=4) == DemandChange(held=1)
    assert cluster.pass_by(NODE_S, 4, requested=4) == []


def test_what_still_waits_makes_way_for_what_the_loader_takes(cluster: Cluster) -> None:
    """It was asked for first, and would get the room of the places that are handed over."""
    cluster.pass_by(LACKING_S, 4)
    cluster.come(2)
    cluster.look(4)
    assert cluster.look(4, requested=2) == DemandChange(held=2, awaited=2)
    (change,) = cluster.pass_by(LACKING_S, 4, requested=2)
    assert (change.ask, cluster.held, cluster.awaited) == (2, 0, 2)


def test_what_is_not_useful_any_more_goes_back_after_a_while(cluster: Cluster) -> None:
    cluster.pass_by(LACKING_S, 6)
    cluster.come(2)
    assert cluster.pass_by(SPARE_S - 1, 3) == []
    assert cluster.pass_by(2, 3) == [DemandChange(awaited=3)]
    assert cluster.pass_by(SPARE_S + 1, 0) == [DemandChange(held=2, awaited=1)]
    assert (cluster.held, cluster.awaited) == (0, 0)
    assert len(cluster.told) == 1


def test_a_request_that_nobody_grants_goes_back_and_pauses(cluster: Cluster) -> None:
    for _ in range(3):
        cluster.pass_by(LACKING_S, 2)
        assert cluster.awaited == 2
        (change,) = cluster.pass_by(NODE_S, 2)
        assert (change.awaited, cluster.awaited) == (2, 0)
        assert "no node came for them within 600 s" in change.message
        assert round(cluster.demand.pause_until - cluster.now, -1) == PAUSE_S
        assert cluster.pass_by(cluster.demand.pause_until - cluster.now - 2, 2) == []
        cluster.now = cluster.demand.pause_until


def test_places_that_nobody_takes_go_back_with_all_others(cluster: Cluster) -> None:
    cluster.pass_by(LACKING_S, 4)
    cluster.come(3)
    (change,) = cluster.pass_by(UNTAKEN_S, 4)
    assert (change.held, change.awaited) == (3, 1)
    assert "Gave back 3 places for workers on the cluster that came on request" in change.message


def test_a_node_that_is_lost_is_asked_for_anew(cluster: Cluster) -> None:
    cluster.pass_by(LACKING_S, 2)
    cluster.come(2)
    cluster.look(2)
    cluster.held, cluster.awaited = 0, 2
    assert cluster.pass_by(UNTAKEN_S + 5, 2) == []
    cluster.come(2)
    assert cluster.pass_by(UNTAKEN_S - 5, 2) == []
