"""Homes of logical workers: who moves where, and who never lives in two places."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dpex.core.placement import Homes, Place

NEAR = [Place("local", n) for n in range(4)]
FAR = [Place("remote", n) for n in range(4)]


def settled(homes: Homes, *places: Place) -> Homes:
    for logical, place in enumerate(places):
        homes.settle(logical, place)
    return homes


def test_everybody_is_homeless_at_first() -> None:
    homes = Homes(3)
    assert homes.homeless() == [0, 1, 2]
    assert homes.tenants(NEAR[0]) == set()


def test_settling_hands_over_the_state_once() -> None:
    homes = Homes(1)
    assert homes.settle(0, NEAR[0]) is None
    homes.leave(0)
    homes.left(0, "state")
    assert homes.homeless() == [0]
    assert homes.settle(0, NEAR[1]) == "state"
    assert homes.state == [None]


def test_a_leaving_one_is_at_home_until_it_has_left() -> None:
    homes = settled(Homes(2), NEAR[0], NEAR[0])
    assert homes.leave(1) == NEAR[0]
    assert (homes.tenants(NEAR[0]), homes.leaving, homes.homeless()) == ({0, 1}, {1}, [])
    homes.left(1, None)
    assert (homes.tenants(NEAR[0]), homes.leaving, homes.homeless()) == ({0}, set(), [1])


def test_who_is_evicted_is_homeless_and_no_longer_leaving() -> None:
    homes = settled(Homes(3), NEAR[0], NEAR[1], NEAR[0])
    homes.leave(2)
    assert homes.evicted(NEAR[0]) == [0, 2]
    assert (homes.homeless(), homes.leaving, homes.state) == ([0, 2], set(), [None] * 3)
    assert homes.evicted(NEAR[0]) == []


def test_leaving_twice_over_a_death_keeps_the_state() -> None:
    """The host's answer arrives after the news of its death."""
    homes = settled(Homes(1), NEAR[0])
    homes.leave(0)
    homes.evicted(NEAR[0])
    homes.left(0, "state")
    assert homes.settle(0, NEAR[1]) == "state"


def test_each_takes_an_empty_host() -> None:
    assert Homes(3).choose(NEAR[:3], 3, crowd=False) == [(0, NEAR[0]), (1, NEAR[1]), (2, NEAR[2])]


def test_this_machine_comes_before_the_cluster() -> None:
    assert Homes(2).choose([FAR[0], NEAR[3], NEAR[1]], 3, crowd=False) == [(0, NEAR[1]), (1, NEAR[3])]


def test_a_second_tenant_waits_for_hosts_that_are_on_their_way() -> None:
    homes = settled(Homes(4), NEAR[0])
    assert homes.choose(NEAR[:1], 4, crowd=False) == []
    assert homes.choose(NEAR[:2], 4, crowd=False) == [(1, NEAR[1])]
    assert homes.choose(NEAR[:2], 2, crowd=False) == [(1, NEAR[1]), (2, NEAR[0]), (3, NEAR[1])]


def test_a_crowd_waits_for_nobody() -> None:
    assert Homes(3).choose(NEAR[:1], 3, crowd=True) == [(0, NEAR[0]), (1, NEAR[0]), (2, NEAR[0])]


@pytest.mark.parametrize("crowd", [False, True])
def test_without_hosts_nobody_moves(crowd: bool) -> None:
    assert Homes(2).choose([], 2, crowd=crowd) == []


def test_no_hosts_wanted_is_no_division_by_zero() -> None:
    assert Homes(2).choose(NEAR[:1], 0, crowd=False) == [(0, NEAR[0]), (1, NEAR[0])]


def test_choosing_moves_nobody() -> None:
    homes = Homes(2)
    homes.choose(NEAR[:2], 2, crowd=False)
    assert homes.homeless() == [0, 1]


def test_spare_is_one_of_the_fullest_when_a_host_is_empty() -> None:
    homes = settled(Homes(4), NEAR[0], NEAR[1], NEAR[1], NEAR[1])
    assert homes.spare(NEAR[:3]) == 3


@pytest.mark.parametrize(
    "places",
    [(NEAR[0], NEAR[1]), (NEAR[0], NEAR[0])],
    ids=["nobody shares", "no host is empty"],
)
def test_no_spare(places: tuple[Place, ...]) -> None:
    homes = settled(Homes(2), *places)
    hosts = sorted(set(places))
    assert homes.spare([*hosts, NEAR[2]] if len(hosts) == 2 else hosts) is None


def test_one_move_at_a_time() -> None:
    homes = settled(Homes(3), NEAR[0], NEAR[0], NEAR[0])
    homes.leave(homes.spare(NEAR[:2]) or 0)
    assert homes.spare(NEAR[:2]) is None
    homes.left(2, None)
    assert homes.spare(NEAR[:2]) is None


def test_no_hosts_no_spare() -> None:
    assert settled(Homes(1), NEAR[0]).spare([]) is None


@given(st.integers(1, 9), st.lists(st.sampled_from(NEAR + FAR), unique=True, min_size=1), st.integers(1, 9))
def test_no_host_takes_more_than_its_share(logicals: int, hosts: list[Place], wanted: int) -> None:
    moves = Homes(logicals).choose(hosts, wanted, crowd=False)
    load = [sum(place == host for _, place in moves) for host in hosts]
    assert max(load) <= -(-logicals // wanted)
    assert max(load) - min(load) <= 1
    assert [logical for logical, _ in moves] == list(range(len(moves)))


class HomesMachine(RuleBasedStateMachine):
    """Hosts come and go, logical workers move: each has one home or none, and its newest state goes along."""

    @initialize(logicals=st.integers(1, 5))
    def start(self, logicals: int) -> None:
        self.homes = Homes(logicals)
        self.hosts: set[Place] = set()
        self.at: list[Place | None] = [None] * logicals
        self.leaving: set[int] = set()
        self.state: list[Any] = [None] * logicals
        self.fresh_state = count()

    @rule(place=st.sampled_from(NEAR[:2] + FAR[:2]))
    def host_up(self, place: Place) -> None:
        self.hosts.add(place)

    @precondition(lambda self: self.hosts)
    @rule(data=st.data())
    def host_gone(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.hosts)))
        self.hosts.remove(place)
        expected = [k for k, home in enumerate(self.at) if home == place]
        assert self.homes.evicted(place) == expected
        for k in expected:
            self.at[k] = None
            self.leaving.discard(k)

    @rule(wanted=st.integers(0, 6), crowd=st.booleans())
    def move_in(self, wanted: int, crowd: bool) -> None:
        for k, place in self.homes.choose(self.hosts, wanted, crowd=crowd):
            assert self.at[k] is None
            assert place in self.hosts
            assert self.homes.settle(k, place) == self.state[k]
            self.at[k], self.state[k] = place, None

    @rule()
    def rebalance(self) -> None:
        spare = self.homes.spare(self.hosts)
        if spare is not None:
            assert self.homes.leave(spare) == self.at[spare]
            self.leaving.add(spare)

    @precondition(lambda self: self.leaving)
    @rule()
    def released(self) -> None:
        k = min(self.leaving)
        self.state[k] = next(self.fresh_state)
        self.homes.left(k, self.state[k])
        self.at[k] = None
        self.leaving.remove(k)

    @invariant()
    def one_home_or_none(self) -> None:
        homes = self.homes
        assert homes.home == self.at
        assert homes.homeless() == [k for k, place in enumerate(self.at) if place is None]
        assert homes.leaving == self.leaving
        assert homes.state == self.state
        for place in NEAR + FAR:
            assert homes.tenants(place) == {k for k, home in enumerate(self.at) if home == place}


TestHomesMachine = HomesMachine.TestCase
