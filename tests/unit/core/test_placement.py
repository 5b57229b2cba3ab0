"""Placement of logical workers: who moves where, and who never lives in two places."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpex.core.placement import Place, Placement

NEAR = [Place("local", n) for n in range(4)]
FAR = [Place("remote", n) for n in range(4)]


def settled(placement: Placement, *places: Place) -> Placement:
    for logical, place in enumerate(places):
        placement.settle(logical, place)
    return placement


def test_everybody_is_unassigned_at_first() -> None:
    placement = Placement(3)
    assert placement.unassigned() == [0, 1, 2]
    assert placement.logical_workers(NEAR[0]) == set()


def test_settling_hands_over_the_state_once() -> None:
    placement = Placement(1)
    assert placement.settle(0, NEAR[0]) is None
    placement.leave(0)
    placement.left(0, "state")
    assert placement.unassigned() == [0]
    assert placement.settle(0, NEAR[1]) == "state"
    assert placement.state == [None]


def test_a_leaving_one_stays_assigned_until_it_has_left() -> None:
    placement = settled(Placement(2), NEAR[0], NEAR[0])
    assert placement.leave(1) == NEAR[0]
    assert (placement.logical_workers(NEAR[0]), placement.leaving, placement.unassigned()) == ({0, 1}, {1}, [])
    placement.left(1, None)
    assert (placement.logical_workers(NEAR[0]), placement.leaving, placement.unassigned()) == ({0}, set(), [1])


def test_who_is_evicted_is_unassigned_and_no_longer_leaving() -> None:
    placement = settled(Placement(3), NEAR[0], NEAR[1], NEAR[0])
    placement.leave(2)
    assert placement.evicted(NEAR[0]) == [0, 2]
    assert (placement.unassigned(), placement.leaving, placement.state) == ([0, 2], set(), [None] * 3)
    assert placement.evicted(NEAR[0]) == []


def test_leaving_twice_over_a_death_keeps_the_state() -> None:
    """The worker's answer arrives after the news of its death."""
    placement = settled(Placement(1), NEAR[0])
    placement.leave(0)
    placement.evicted(NEAR[0])
    placement.left(0, "state")
    assert placement.settle(0, NEAR[1]) == "state"


def test_each_takes_an_empty_worker() -> None:
    assert Placement(3).choose(NEAR[:3], 3, crowd=False) == [(0, NEAR[0]), (1, NEAR[1]), (2, NEAR[2])]


def test_this_machine_comes_before_the_cluster() -> None:
    assert Placement(2).choose([FAR[0], NEAR[3], NEAR[1]], 3, crowd=False) == [(0, NEAR[1]), (1, NEAR[3])]


def test_a_second_logical_worker_waits_for_workers_that_are_on_their_way() -> None:
    placement = settled(Placement(4), NEAR[0])
    assert placement.choose(NEAR[:1], 4, crowd=False) == []
    assert placement.choose(NEAR[:2], 4, crowd=False) == [(1, NEAR[1])]
    assert placement.choose(NEAR[:2], 2, crowd=False) == [(1, NEAR[1]), (2, NEAR[0]), (3, NEAR[1])]


def test_a_crowd_waits_for_nobody() -> None:
    assert Placement(3).choose(NEAR[:1], 3, crowd=True) == [(0, NEAR[0]), (1, NEAR[0]), (2, NEAR[0])]


@pytest.mark.parametrize("crowd", [False, True])
def test_without_workers_nobody_moves(crowd: bool) -> None:
    assert Placement(2).choose([], 2, crowd=crowd) == []


def test_no_workers_wanted_is_no_division_by_zero() -> None:
    assert Placement(2).choose(NEAR[:1], 0, crowd=False) == [(0, NEAR[0]), (1, NEAR[0])]


def test_choosing_moves_nobody() -> None:
    placement = Placement(2)
    placement.choose(NEAR[:2], 2, crowd=False)
    assert placement.unassigned() == [0, 1]


def test_spare_is_one_of_the_fullest_when_a_worker_is_empty() -> None:
    placement = settled(Placement(4), NEAR[0], NEAR[1], NEAR[1], NEAR[1])
    assert placement.spare(NEAR[:3]) == 3


@pytest.mark.parametrize(
    "places",
    [(NEAR[0], NEAR[1]), (NEAR[0], NEAR[0])],
    ids=["nobody shares", "no worker is empty"],
)
def test_no_spare(places: tuple[Place, ...]) -> None:
    placement = settled(Placement(2), *places)
    workers = sorted(set(places))
    assert placement.spare([*workers, NEAR[2]] if len(workers) == 2 else workers) is None


def test_one_move_at_a_time() -> None:
    placement = settled(Placement(3), NEAR[0], NEAR[0], NEAR[0])
    placement.leave(placement.spare(NEAR[:2]) or 0)
    assert placement.spare(NEAR[:2]) is None
    placement.left(2, None)
    assert placement.spare(NEAR[:2]) is None


def test_no_workers_no_spare() -> None:
    assert settled(Placement(1), NEAR[0]).spare([]) is None


@given(st.integers(1, 9), st.lists(st.sampled_from(NEAR + FAR), unique=True, min_size=1), st.integers(1, 9))
def test_no_worker_takes_more_than_its_share(logicals: int, workers: list[Place], wanted: int) -> None:
    moves = Placement(logicals).choose(workers, wanted, crowd=False)
    load = [sum(place == worker for _, place in moves) for worker in workers]
    assert max(load) <= -(-logicals // wanted)
    assert max(load) - min(load) <= 1
    assert [logical for logical, _ in moves] == list(range(len(moves)))


class PlacementMachine(RuleBasedStateMachine):
    """Workers come and go, logical workers move: each has one worker or none, and its newest state goes along."""

    @initialize(logicals=st.integers(1, 5))
    def start(self, logicals: int) -> None:
        self.placement = Placement(logicals)
        self.workers: set[Place] = set()
        self.at: list[Place | None] = [None] * logicals
        self.leaving: set[int] = set()
        self.state: list[Any] = [None] * logicals
        self.fresh_state = count()

    @rule(place=st.sampled_from(NEAR[:2] + FAR[:2]))
    def worker_up(self, place: Place) -> None:
        self.workers.add(place)

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def worker_gone(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.workers)))
        self.workers.remove(place)
        expected = [k for k, at in enumerate(self.at) if at == place]
        assert self.placement.evicted(place) == expected
        for k in expected:
            self.at[k] = None
            self.leaving.discard(k)

    @rule(wanted=st.integers(0, 6), crowd=st.booleans())
    def move_in(self, wanted: int, crowd: bool) -> None:
        for k, place in self.placement.choose(self.workers, wanted, crowd=crowd):
            assert self.at[k] is None
            assert place in self.workers
            assert self.placement.settle(k, place) == self.state[k]
            self.at[k], self.state[k] = place, None

    @rule()
    def rebalance(self) -> None:
        spare = self.placement.spare(self.workers)
        if spare is not None:
            assert self.placement.leave(spare) == self.at[spare]
            self.leaving.add(spare)

    @precondition(lambda self: self.leaving)
    @rule()
    def released(self) -> None:
        k = min(self.leaving)
        self.state[k] = next(self.fresh_state)
        self.placement.left(k, self.state[k])
        self.at[k] = None
        self.leaving.remove(k)

    @invariant()
    def one_worker_or_none(self) -> None:
        placement = self.placement
        assert placement.place_of == self.at
        assert placement.unassigned() == [k for k, place in enumerate(self.at) if place is None]
        assert placement.leaving == self.leaving
        assert placement.state == self.state
        for place in NEAR + FAR:
            assert placement.logical_workers(place) == {k for k, at in enumerate(self.at) if at == place}


TestPlacementMachine = PlacementMachine.TestCase
