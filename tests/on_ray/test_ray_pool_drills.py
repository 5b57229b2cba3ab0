"""What nodes and connections of a Ray cluster may suffer, as the pool of remote workers sees it."""

import contextlib
import os
import signal
import subprocess
import sys
from functools import partial

import pytest
from families import is_alive
from pool_driver import DEADLINE_S, Driver, HeldBack, Large, Numbers, Slow, agents_of, grouped, new_agents
from shared_ray import NODES, QUICK_TO_NOTICE, STORE_BYTES, own_ray
from waiting import until

from dpex.pools.ray.cluster import FAILURES, connect, release
from dpex.schedule.events import Notice, WorkerGone
from dpex.schedule.schedule import Ticket

pytestmark = [pytest.mark.long, pytest.mark.ray]

ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster(ray_of_session):
    """A Ray of its own, as nodes end here; agents of one test serve the next one."""
    with own_ray(ray_of_session, nodes=NODES[:1], settings=QUICK_TO_NOTICE) as started:
        share = connect("auto")
        yield started
        release(share)


@pytest.mark.usefixtures("cluster")
def test_a_broken_connection_costs_its_agent_and_nothing_else():
    with new_agents(), Driver(Large(), 1) as driver:
        driver.wait_up(1)
        driver.make([[(0, [0])]])
        (agent,) = driver.agents()
        agent.link.close()
        for i in (1, 3):
            driver.send([Ticket(i, [i] * 8, 0), Ticket(i + 1, [i + 1] * 8, 0)])
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert "its connection ended" in gone.why
        assert gone.working_on is None
        assert not gone.expected
        driver.wait_up(1)
        driver.make([[(number, [number] * 8)] for number in gone.lost])
        driver.make([[(5, [5] * 8)]])
        assert sorted(driver.made) == list(range(6))
        assert all((batch == i).all() for i, (batch,) in driver.made.items())


@pytest.mark.usefixtures("cluster")
def test_a_killed_guardian_ends_its_processes_and_is_replaced():
    with Driver(Numbers(), 2) as driver:
        driver.wait_up(2)
        pids = [*driver.pids(), *(agent.pid for agent in driver.agent_processes())]
        (node,) = driver.pool._nodes._nodes.values()
        os.kill(node.pid, signal.SIGKILL)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        driver.wait_up(2)
        driver.make(grouped(4, 1))
    until(lambda: not any(map(is_alive, pids)), DEADLINE_S)


@contextlib.contextmanager
def extra_node(cluster, **options):
    node = cluster.add_node(object_store_memory=STORE_BYTES, **options)
    cluster.wait_for_nodes()
    try:
        yield node
    finally:
        share = connect("auto")
        share.parked.clear()  # agents of this node, which a later test would take for living ones
        release(share)
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=True)
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == len(cluster.list_all_nodes()), DEADLINE_S, pause_s=0.05)


def test_workers_leave_a_node_that_is_drained(cluster):
    either = {"num_cpus": 2, "resources": {"either": 2}}
    with (
        extra_node(cluster, **either) as first,
        extra_node(cluster, **either) as second,
        Driver(Slow(), 2, options={"resources": {"either": 1}}) as driver,
    ):
        driver.wait_up(2)
        assert set(driver.pool._nodes._nodes) == {first.node_id, second.node_id}
        command = [sys.executable, "-m", "ray.scripts.scripts", "drain-node", "--address", cluster.address]
        reason = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "a test"]
        subprocess.run(
            [*command, "--node-id", first.node_id, *reason, "--deadline-remaining-seconds", "3600"], check=True
        )
        sent = 0

        def has_left():
            nonlocal sent
            sent += driver.pool.send([Ticket(sent, [sent], 0)], 0)
            return driver.of(WorkerGone) and driver.pool.counts.running == 2

        driver.listen_until(has_left)
        assert all(gone.expected for gone in driver.of(WorkerGone))
        numbers = driver.pool._nodes._numbers
        assert {numbers[agent.number].node for agent in driver.agents() if agent.up} == {second.node_id}
        driver.listen_until(lambda: {*driver.made, *driver.lost()} == set(range(sent)))
        cluster.remove_node(first, allow_graceful=False)


def test_a_removed_node_loses_its_tickets_without_blame(cluster, tmp_path):
    samples = HeldBack(tmp_path)
    with extra_node(cluster, num_cpus=2, resources={"doomed": 2}) as node:
        with Driver(samples, 2, options={"resources": {"doomed": 1}}) as driver:
            driver.wait_up(2)
            sent = 0

            def with_one_more(enough):
                nonlocal sent
                sent += driver.pool.send([Ticket(sent, [sent + 1], 0)], 0)
                return enough()

            driver.listen_until(lambda: with_one_more(lambda: samples.begun() == 2))
            os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            driver.listen_until(lambda: with_one_more(lambda: len(driver.of(WorkerGone)) == 2))
            assert not driver.made
            assert sorted(driver.lost()) == list(range(sent))
            assert not any(gone.expected for gone in driver.of(WorkerGone))
            assert driver.pool.counts.running == 0
            driver.listen_until(lambda: driver.pool.failed is not None)
        cluster.remove_node(node, allow_graceful=False)


def test_a_node_that_fails_repeatedly_is_excluded_for_a_while(cluster, monkeypatch):
    monkeypatch.setattr("dpex.pools.ray.cluster.WITHIN_S", 1000.0)
    monkeypatch.setattr("dpex.pools.ray.cluster.PAUSE_S", 3.0)
    one = {"num_cpus": 1, "resources": {"flaky": 1}}
    driven = partial(Driver, Numbers(), 2, options={"resources": {"flaky": 1}})
    with extra_node(cluster, **one) as bad, extra_node(cluster, **one), driven() as driver:

        def agent():
            (pid,) = [node.pid for node in driver.pool._nodes._nodes.values() if node.node == bad.node_id]
            return agents_of(pid)

        for _ in range(FAILURES):
            driver.wait_up(2)
            until(agent)
            agent()[0].kill()
            driver.listen_until(lambda: driver.pool.counts.running < 2)
        seen = []
        driver.listen_until(lambda: seen or seen.extend(driver.pool.counts.failed.values()))
        (why,) = seen
        assert any("gets no workers" in note.text for note in driver.of(Notice))
        assert bad.node_id[:8] in why
        assert "its agent ended" in why
        driver.make(grouped(10, 2))
        driver.wait_up(2)
        assert not driver.pool.counts.why_excluded
