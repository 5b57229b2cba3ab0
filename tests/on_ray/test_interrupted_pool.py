"""An exception inside ``next()`` with workers on a Ray cluster: the room on the nodes stays, agents are replaced."""

import warnings
from itertools import islice
from typing import Any

import psutil
import pytest
import torch
from families import Augmented, seeded
from inspection import pool_of
from test_cluster import SHAPE, assert_same, remote, until_all_run

from dpex import DpexDataLoader
from dpex.pools.agent.pool import RemotePool

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]
WORK = Augmented(20_000)


class Break:
    """Raises in the middle of a change of the pool, once it is armed, so often."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, function: str) -> None:
        self.left = 0
        inner = getattr(RemotePool, function)

        def breaks(pool: RemotePool, *arguments: Any, **options: Any) -> Any:
            if self.left:
                self.left -= 1
                raise KeyboardInterrupt
            return inner(pool, *arguments, **options)

        monkeypatch.setattr(RemotePool, function, breaks)


def guardians_and_agents(pool: Any) -> tuple[set[Any], set[int]]:
    """The guardians of the pool's nodes, and the processes of its agents."""
    nodes = pool._nodes._nodes.values()
    return {node.guardian for node in nodes}, {
        agent.pid for node in nodes for agent in psutil.Process(node.pid).children()
    }


def taken_through(breaks: Break, iterator: Any, count: int, interrupts: int) -> tuple[list[torch.Tensor], int]:
    """Return ``count`` batches, and the number of exceptions that came between them."""
    got: list[torch.Tensor] = []
    breaks.left, came = interrupts, 0
    while len(got) < count:
        try:
            got.append(next(iterator))
        except KeyboardInterrupt:
            came += 1
    return got, came


@pytest.mark.parametrize("seeding", ["batch", pytest.param("worker", marks=pytest.mark.long)])
@pytest.mark.parametrize("function", ["_made", pytest.param("send", marks=pytest.mark.long)])
def test_nodes_and_room_stay_when_agents_are_replaced(
    seeding: Any, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    breaks = Break(monkeypatch, function)
    with remote(WORK, **SHAPE, num_workers=2, seeding=seeding) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator: Any = iter(loader)
        got = until_all_run(loader, iterator)
        pool = pool_of(iterator, "remote")
        guardians, agents = guardians_and_agents(pool)
        reservations = {id(reservation) for reservation in pool._nodes._room._reserved}
        more, came = taken_through(breaks, iterator, 40, 2)
        got += more
        renewed = pool_of(iterator, "remote")
        assert came == 2
        assert renewed is not pool
        assert renewed._nodes is pool._nodes
        assert guardians_and_agents(renewed)[0] == guardians
        assert not guardians_and_agents(renewed)[1] & agents
        assert {id(reservation) for reservation in pool._nodes._room._reserved} == reservations
    options: Any = {"num_workers": 0} if seeding == "batch" else {"num_workers": 2}
    made = DpexDataLoader(WORK, **SHAPE, seeding=seeding, generator=seeded(), **options)
    assert_same(list(islice(made, len(got))), got)
