"""The loader with workers of agents: the batches of local workers, whatever happens to an agent."""

import os
import signal
import threading
import warnings
from functools import partial
from itertools import islice
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, seeded
from inspection import engine_of, pool_of
from torch.utils.data import DataLoader
from waiting import until

from benchmarks.network.nodes import ProcessNodes
from dpex import DpexDataLoader, IteratorInterruptedError
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.agent.pool import NodeNews, RemotePool, order_of
from dpex.pools.factory import PoolFactory
from dpex.telemetry.loader_metrics import values_of

SHAPE: dict[str, Any] = {"batch_size": 4, "shuffle": True}


FIRST, SECOND = 0, 1
"""The nodes."""


@pytest.fixture(autouse=True)
def agents(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Room on two nodes for remote workers, without Ray."""
    rooms = [2, 2]
    local = PoolFactory.__call__

    def make(self: PoolFactory, name: str, count: int, setup: Any, shared_queue: bool) -> Any:
        if name == "remote":
            order = partial(order_of, shared_queue=shared_queue, probes=True)
            return RemotePool(ProcessNodes(setup, rooms), order, first_workers=count)
        return local(self, name, count, setup, shared_queue)

    monkeypatch.setattr(PoolFactory, "__call__", make)
    monkeypatch.setattr(LoaderRuntime, "hold_cluster", lambda self, head_address: None)
    return rooms


def remote(dataset: Any, **options: Any) -> DpexDataLoader[torch.Tensor]:
    return DpexDataLoader(dataset, distribute_mode=True, generator=seeded(), **SHAPE, **options)


def test_batches_are_torchs() -> None:
    expected = list(DataLoader(Augmented(120), num_workers=3, generator=seeded(), **SHAPE))
    with remote(Augmented(120), num_workers=3) as loader:
        iterator: Any = iter(loader)
        assert_same(torch.cat(list(islice(iterator, len(loader)))), torch.cat(expected))
        pool = pool_of(iterator, "remote")
        assert pool.counts.running > 0
        assert pool.at_work() == 0, "a worker without a ticket counts as at work"


class Large(Augmented):
    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((3, 200, 200), float(index))


def test_large_batches() -> None:
    with remote(Large(80), num_workers=4, seeding="batch") as loader:
        iterator: Any = iter(loader)
        times = pool_of(iterator, "remote").times
        got = list(iterator)
    assert times.nbytes == 20 * got[0].nbytes
    assert sorted(float(batch[i, 0, 0, 0]) for batch in got for i in range(4)) == list(range(80))
    assert all(torch.equal(batch, batch[:, :1, :1, :1].expand_as(batch)) for batch in got)


def test_an_excluded_node_is_in_stats_metrics_and_diagnosis(agents: list[int]) -> None:
    agents[SECOND] = 0
    why = "node bad-one gets no workers for 30 s, as it failed 3 times within 60 s; the last time: its agent ended"
    with remote(Augmented(80), num_workers=1, seeding="batch") as loader:
        iterator: Any = iter(loader)
        pool = pool_of(iterator, "remote")
        until(lambda: pool._nodes._news)
        pool._nodes._news.append(NodeNews("excluded", place="bad-one", why=why))
        pool.poll()
        stats, sums = loader.stats().pools["remote"], engine_of(iterator).reading()
        assert (stats.nodes_excluded, stats.why_excluded) == (1, {"bad-one": why})
        assert values_of(sums).gauges["dpex_nodes_excluded", "remote"] == 1
        assert "Node bad-one gets no workers for 30 s" in str(loader.diagnose())
        pool._nodes._news.append(NodeNews("excluded", place="bad-one"))
        pool.poll()
        assert loader.stats().pools["remote"].why_excluded == {}
        assert "bad-one" in " ".join(loader.diagnose().facts.failed_nodes)


@pytest.mark.parametrize(
    ("seeding", "agent"), [("worker", FIRST), pytest.param("batch", SECOND, marks=pytest.mark.long)]
)
def test_a_worker_and_an_agent_that_are_killed_change_nothing(seeding: Any, agent: int) -> None:
    dataset = Augmented(20000, nap_s=0.002)
    with remote(dataset, num_workers=4, seeding=seeding) as loader, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        iterator: Any = iter(loader)
        got = list(islice(iterator, 4))
        pool = pool_of(iterator, "remote")

        def all_run() -> bool:
            got.append(next(iterator))
            return bool(pool.counts.running == 4)

        until(all_run, 60.0)
        os.kill(pool._nodes.processes[agent].pid, signal.SIGKILL)
        got += islice(iterator, 60)
    reference = DataLoader(Augmented(20000), num_workers=4, generator=seeded(), **SHAPE)
    if seeding == "batch":
        reference = DpexDataLoader(Augmented(20000), seeding="batch", generator=seeded(), **SHAPE)
    assert_same(torch.cat(got), torch.cat(list(islice(reference, len(got)))))


def test_an_interrupt_while_results_are_read_loses_no_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made, interrupts = RemotePool._made, iter([False, False, True])

    def breaks(pool: RemotePool, *frame: Any) -> None:
        if next(interrupts, False):
            raise KeyboardInterrupt
        made(pool, *frame)

    monkeypatch.setattr(RemotePool, "_made", breaks)
    with remote(Augmented(120), num_workers=3, seeding="batch") as loader:
        iterator, got = iter(loader), list[torch.Tensor]()
        with pytest.raises(KeyboardInterrupt):
            got.extend(iterator)
        with pytest.raises(IteratorInterruptedError, match="KeyboardInterrupt"):
            next(iterator)
        loader.load_state_dict(loader.state_dict())
        got.extend(loader)
    assert_same(
        torch.cat(got), torch.cat(list(DpexDataLoader(Augmented(120), seeding="batch", generator=seeded(), **SHAPE)))
    )


@pytest.mark.long
def test_an_agent_that_stood_still_goes_on_with_what_it_held() -> None:
    """As a node that is cut off for a while: its batches are waited for, and nobody makes them a second time."""
    with remote(Augmented(20000, nap_s=0.002), num_workers=4, seeding="batch") as loader:
        iterator: Any = iter(loader)
        got = list(islice(iterator, 4))
        pool = pool_of(iterator, "remote")

        def all_run() -> bool:
            got.append(next(iterator))
            return bool(pool.counts.running == 4)

        until(all_run, 60.0)
        schedule, agents = engine_of(iterator).schedule, pool._agents
        stopped = pool._nodes.processes[SECOND].pid
        waited: list[bool] = []

        def let_go_on() -> None:
            """Once next() waits for a batch of the one that stands still."""
            try:
                waited.append(until(lambda: schedule.next_number in agents[SECOND].held))
            finally:
                os.kill(stopped, signal.SIGCONT)

        os.kill(stopped, signal.SIGSTOP)
        helper = threading.Thread(target=let_go_on)
        helper.start()
        got += islice(iterator, 60)
        helper.join()
        assert waited
        assert loader.stats().deaths == 0
    reference = DpexDataLoader(Augmented(20000), seeding="batch", generator=seeded(), **SHAPE)
    assert_same(torch.cat(got), torch.cat(list(islice(reference, len(got)))))
