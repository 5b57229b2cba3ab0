"""The remote pool on a real Ray cluster: several raylets on this machine, driven with tickets, without a loader."""

import contextlib
import os
import random
import select
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch
import waiting
from families import is_alive
from torch.utils.data import default_collate, get_worker_info
from waiting import meet, until
from workload import wait_as_work

from dpex.core import failing_nodes
from dpex.core.events import Notice, Released, Snapshot, TicketMade, WorkerGone, WorkerUp
from dpex.core.schedule import Ticket
from dpex.errors import ShippingError
from dpex.pools.agent.admission import AdmissionServer
from dpex.pools.ray.cluster import Parked, connect, release
from dpex.system.other_threads import OtherThreads
from dpex.worker.core import WorkerCore
from dpex.worker.outcome import Failure, StreamEnd
from dpex.worker.setup import WorkerSetup

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ray = pytest.importorskip("ray")
DEADLINE_S = 120
STORE_BYTES = 300 << 20
PIECE_BYTES = 1 << 20


class Numbers:
    def __getitem__(self, index):
        return torch.full((5,), float(index))


class Noise:
    def __getitem__(self, index):
        return torch.rand(3) + random.random() + np.random.rand()


class Large:
    def __getitem__(self, index):
        return torch.full((3, 128, 128), float(index))


class Shared:
    """A large array that each sample reads and writes."""

    def __init__(self):
        self.array = np.zeros(2 << 20, np.uint8)
        self.tensor = torch.zeros(1 << 20, dtype=torch.uint8)

    def __getitem__(self, index):
        before = int(self.array[7]), int(self.tensor[7])
        self.array[7] += 1
        self.tensor[7] += 1
        maps = open("/proc/self/maps").read()  # noqa: SIM115, PTH123
        return (*before, maps.count("dpex-shipped"), os.getpid())


class Faulty:
    def __getitem__(self, index):
        return torch.tensor(1 // (index % 3))


class Deadly:
    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class Slow:
    """Samples that are read slowly, so that not much is made while a node is drained."""

    def __getitem__(self, index):
        wait_as_work(0.05)
        return torch.tensor(index)


class HeldBack:
    """Samples that are not there before `let_go`, but for the first: that one is fetched to find out whether a node can
    serve.

    ``place``: a folder, where a worker that was asked for another one leaves a file.
    """

    def __init__(self, place):
        self.place = place

    def __getitem__(self, index):
        if index:
            (self.place / str(os.getpid())).touch()
            until((self.place / "open").exists, 10 * DEADLINE_S)
        return torch.tensor(index)

    def let_go(self):
        (self.place / "open").touch()

    def begun(self):
        """How many workers were asked for one."""
        return sum(path.name.isdigit() for path in self.place.iterdir())


class NodeBound:
    """Cannot be opened on the node that calls itself "bare"."""

    def __setstate__(self, state):
        if os.environ.get("DPEX_TEST_NODE") == "bare":
            raise ModuleNotFoundError("No module named 'rare_codec'")

    def __getstate__(self):
        return {"x": 1}

    def __getitem__(self, index):
        return os.environ.get("DPEX_TEST_NODE", "")


class FileBound:
    """Opens a file for each sample that exists on no other node."""

    def __getitem__(self, index):
        if os.environ.get("DPEX_TEST_NODE") == "bare":
            raise FileNotFoundError("/data/samples.bin")
        return os.environ.get("DPEX_TEST_NODE", "")


class OnNoNode:
    def __setstate__(self, state):
        raise ImportError("nowhere")

    def __getstate__(self):
        return {"x": 1}


class Countdown:
    def __iter__(self):
        worker = get_worker_info()
        return iter(torch.tensor([worker.id, i]) for i in range(3))


class Opaque:
    def __init__(self):
        self.handle = (i for i in range(3))


@pytest.fixture(scope="module")
def cluster():
    """A head without processors and one node with three; Ray is connected."""
    from ray.cluster_utils import Cluster

    for module in (waiting, sys.modules[__name__]):
        ray.cloudpickle.register_pickle_by_value(module)
    quiet = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    made.add_node(num_cpus=3, resources={"main": 100}, object_store_memory=STORE_BYTES)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    for module in (waiting, sys.modules[__name__]):
        ray.cloudpickle.unregister_pickle_by_value(module)


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


def setup_of(dataset, **changes):
    setup = WorkerSetup(
        dataset=dataset,
        collate_fn=default_collate,
        worker_init_fn=None,
        iterable=False,
        auto_collation=True,
        drop_last=False,
        num_workers=2,
        base_seed=11,
        per_batch_seed=True,
    )
    return replace(setup, **changes)


class Driver:
    """Stands in for the engine: sends tickets, collects what happens."""

    def __init__(self, dataset, workers, *, shared_queue=True, resources=None, options=None, **setup):
        from dpex.pools.ray.pool import RayPool

        self.pool = RayPool(
            setup_of(dataset, **setup),
            head_address="auto",
            ray_remote_args={"resources": resources or {"main": 1}, **(options or {})},
            shared_queue=shared_queue,
            first_workers=workers,
            probe_index=0,
        )
        self.events = []
        self.made = {}

    def agents(self):
        return list(self.pool._agents.values())

    def agent_processes(self):
        """Of all nodes; each is its guardian's child."""
        return [agent for node in self.pool._nodes._nodes.values() for agent in psutil.Process(node.pid).children()]

    def pids(self):
        """Processes of the workers, which an agent's only child forks."""
        templates = [template for agent in self.agent_processes() for template in agent.children()]
        return [worker.pid for template in templates for worker in template.children()]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.pool.close(5.0)

    def listen_until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            select.select(self.pool.descriptors(), [], [], 0.1)
            heard = self.pool.poll()
            while heard:
                event = heard.popleft()
                self.events.append(event)
                if isinstance(event, TicketMade):
                    self.made.setdefault(event.number, []).append(event.value())

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def lost(self):
        """Tickets that workers took with them."""
        return [number for gone in self.of(WorkerGone) for number in gone.lost]

    def wait_up(self, workers):
        self.listen_until(lambda: self.pool.counts.running >= workers)

    def send(self, tickets, epoch=0, worker=None):
        def sent():
            return self.pool.send(tickets, epoch, worker)

        self.listen_until(sent)

    def make(self, groups, epoch=0, worker=None, queue=0):
        """Groups of (number, index) pairs, all delivered."""
        for group in groups:
            self.send([Ticket(number, index, queue) for number, index in group], epoch, worker)
        numbers = {number for group in groups for number, _ in group}
        self.listen_until(lambda: numbers <= self.made.keys())
        return {number: self.made[number][0] for number in sorted(numbers)}


def grouped(count, size, index=lambda i: [i]):
    pairs = [(i, index(i)) for i in range(count)]
    return [pairs[i : i + size] for i in range(0, count, size)]


@pytest.fixture(scope="module")
def shares(cluster):
    """A share of the connection, so that the processes of one test serve the next one.

    Starting them is most of what a test costs: minutes of it where other work fills the machine.
    """
    held = [connect("auto")]
    yield held
    release(held.pop())


@pytest.fixture
def main_node(cluster, shares):
    """The node that stays."""
    return cluster


@pytest.fixture
def unshared(main_node, shares):
    """The node that stays, where processes end with the last pool."""
    release(shares.pop())
    yield main_node
    shares.append(connect("auto"))


def test_threads_that_ray_starts_here_draw_nothing(cluster):
    started = {thread.name for thread in threading.enumerate() if thread.name.lower().startswith(("ray", "python"))}
    assert "ray_listen_error_messages" in started
    assert started.isdisjoint(thread.name for thread in OtherThreads().clocks())


def test_small_batches_travel_in_groups_and_are_right(main_node):
    with Driver(Numbers(), 2) as driver:
        driver.wait_up(2)
        made = driver.make(grouped(500, 32))
        assert all(torch.equal(batch, torch.full((1, 5), float(i))) for i, batch in made.items())
        assert driver.pool.times.tickets == 500
        assert len(driver.pool.workers()) == driver.pool.counts.running == 2

        def both_make():  # one that is quick makes hundreds of them before the other one wakes
            begin = len(driver.made)
            driver.make([[(number, [number]) for number in range(begin, begin + 32)]])
            return len({event.worker for event in driver.of(TicketMade)}) == 2

        until(both_make, DEADLINE_S)


def go_by(way, monkeypatch):
    """Have batches travel in shared memory, on a connection, or through Ray's object store, which may be the last
    resort."""
    if way == "store":
        monkeypatch.setattr("dpex.pools.ray.nodes.stream_address", lambda: None)
    elif way != "memory":
        monkeypatch.setattr(
            "dpex.pools.agent.link_server.AdmissionServer", Deaf if way == "unreachable" else OnlyNetwork
        )


@pytest.mark.parametrize("way", ["memory", "stream", "store", "unreachable"])
def test_large_batches_are_ordinary_writable_tensors_that_last(main_node, monkeypatch, way):
    go_by(way, monkeypatch)
    with new_agents(), Driver(Large(), 1) as driver:
        driver.wait_up(1)
        made = driver.make(grouped(12, 1, lambda i: [i] * 8))
        assert [agent.link.is_tunnel for agent in driver.agents()] == [way in ("store", "unreachable")]
        assert [agent.link.is_near for agent in driver.agents()] == [way == "memory"]
        notes = [note.text for note in driver.of(Notice)]
        assert len(notes) == (way == "unreachable")
        assert all("object store: it cannot reach" in note for note in notes)
        times = driver.pool.times
        assert times.streamed_bytes == (times.nbytes if way == "stream" else 0)
        assert times.shared_bytes == (times.nbytes if way == "memory" else 0)
    for i, batch in made.items():
        assert batch.shape == (8, 3, 128, 128)
        assert type(batch) is torch.Tensor
        assert (batch == i).all()
        batch += 1
    assert all((batch == i + 1).all() for i, batch in made.items())


class Hoarder:
    """Fills its node's object store with what is in use, so that Ray can neither spill nor evict it."""

    def __init__(self):
        self.held = []
        for _ in range(STORE_BYTES // PIECE_BYTES):
            ref = ray.put(np.ones(PIECE_BYTES, np.uint8))
            self.held.append((ref, ray.get(ref)))

    def count(self):
        return len(self.held)


def filled(cluster):
    """The part of all object stores that is in use, as Ray has it."""
    from ray._private.internal_api import get_memory_info_reply, get_state_from_address

    stats = get_memory_info_reply(get_state_from_address(cluster.address)).store_stats
    return stats.object_store_bytes_used / stats.object_store_bytes_avail


@contextlib.contextmanager
def full_object_stores(cluster):
    """That of the trainer's node, and that of the node with the workers."""
    here = Hoarder()
    there = ray.remote(Hoarder).options(num_cpus=0, resources={"main": 0.01}).remote()
    try:
        assert ray.get(there.count.remote(), timeout=DEADLINE_S) == here.count()
        assert filled(cluster) > 0.99
        yield
    finally:
        ray.kill(there)
        here.held.clear()
    until(lambda: filled(cluster) < 0.5, DEADLINE_S, pause_s=0.1, told=lambda: filled(cluster))


@pytest.mark.parametrize("way", ["stream", "store"])
def test_a_full_object_store_changes_no_batch(main_node, monkeypatch, way):
    """Ray then writes what it has to carry to files."""
    go_by(way, monkeypatch)
    with new_agents(), full_object_stores(main_node), Driver(Large(), 1) as driver:
        driver.wait_up(1)
        made = driver.make(grouped(4, 1, lambda i: [i] * 8))
        assert [agent.link.is_tunnel for agent in driver.agents()] == [way == "store"]
        assert not driver.of(WorkerGone)
        assert filled(main_node) > 0.99
    assert all((batch == i).all() for i, batch in made.items())


class OnlyNetwork(AdmissionServer):
    """As if agents were on other machines."""

    def __init__(self, address, admit):
        super().__init__(address, admit)
        self.local = None


class Deaf(OnlyNetwork):
    """Says that it listens where nobody does."""

    def __init__(self, address, admit):
        super().__init__(address, admit)
        self.port = 1


@contextlib.contextmanager
def new_agents():
    """Nobody takes the agents of another test over, or another test these."""
    share = connect("auto")
    try:
        share.parked.clear()
        share.unreached.clear()
        yield
    finally:
        share.parked.clear()
        share.unreached.clear()
        release(share)


def test_a_broken_connection_costs_its_agent_and_nothing_else(main_node):
    with new_agents(), Driver(Large(), 1) as driver:
        driver.wait_up(1)
        driver.make([[(0, [0])]])
        (agent,) = driver.agents()
        agent.link.close()
        for i in range(1, 5):
            driver.send([Ticket(i, [i] * 8, 0)])
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert "its connection ended" in gone.why
        assert gone.guilty is None
        assert not gone.expected
        driver.wait_up(1)
        driver.make([[(number, [number] * 8)] for number in gone.lost])
        driver.make([[(5, [5] * 8)]])
        assert sorted(driver.made) == list(range(6))
        assert all((batch == i).all() for i, (batch,) in driver.made.items())


def test_a_batch_depends_on_its_number_alone(main_node):
    with Driver(Noise(), 2) as driver:
        driver.wait_up(2)
        made = driver.make(grouped(20, 3))
    core = WorkerCore(setup_of(Noise()))
    python, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    core.adopt(0)
    here = {i: core.make(i, [i], 0, 0)[0] for i in range(20)}
    random.setstate(python)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    torch.utils.data._utils.worker._worker_info = None
    assert all(torch.equal(made[i], here[i]) for i in range(20))


def test_rare_values_arrive_as_they_are(main_node):
    values = {
        0: np.arange(5000),
        1: {"a": (1, "b", None), "n": torch.zeros(0, 3)},
        2: torch.ones(4000, requires_grad=True),
        3: [torch.ones(3).to_sparse(), {1, 2}],
        4: "x" * 100_000,
    }
    with Driver(values, 1, auto_collation=False, collate_fn=same) as driver:
        driver.wait_up(1)
        made = driver.make(grouped(5, 5, lambda i: i))
    assert np.array_equal(made[0], values[0])
    made[0][0] = 9
    assert made[1]["a"] == values[1]["a"]
    assert made[1]["n"].shape == (0, 3)
    assert made[2].requires_grad
    assert made[3][0].is_sparse
    assert made[3][1] == {1, 2}
    assert made[4] == values[4]


def same(value):
    return value


def test_growing_and_shrinking_while_it_works(main_node, tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i + 1], 0) for i in range(4)])
        driver.listen_until(lambda: samples.begun() == 1)
        driver.pool.resize(3)
        assert driver.pool.counts.wanted == 3
        driver.wait_up(3)
        for i in range(4, 12):
            driver.send([Ticket(i, [i + 1], 0)])
        driver.listen_until(lambda: samples.begun() == 3)
        driver.pool.resize(1)
        assert not driver.made
        samples.let_go()
        driver.listen_until(lambda: len(driver.made) == 12 and driver.pool.counts.running == 1)
        gone = driver.of(WorkerGone)
        assert [(event.lost, event.expected) for event in gone] == [((), True)] * 2
        assert sorted(driver.made) == list(range(12))
        driver.make([[(12, [13])]])


def test_requests_beyond_the_cluster_stay_pending(main_node):
    with Driver(Numbers(), 5) as driver:
        driver.wait_up(3)
        driver.make(grouped(10, 1))
        assert (driver.pool.counts.wanted, driver.pool.counts.requested, driver.pool.counts.running) == (5, 5, 3)
        driver.pool.resize(3)
        assert driver.pool.counts.requested == 3


def test_an_error_looks_as_from_torch(main_node):
    with Driver(Faulty(), 1) as driver:
        driver.wait_up(1)
        made = driver.make(grouped(6, 6))
        assert torch.equal(made[1], torch.tensor([1]))
        failure = made[3]
        assert isinstance(failure, Failure)
        with pytest.raises(ZeroDivisionError, match=r"Caught ZeroDivisionError in DataLoader worker process 0"):
            failure.wrapper.reraise()


def test_a_killed_worker_loses_its_tickets_and_is_replaced(main_node, tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 2) as driver:
        driver.wait_up(2)
        pids, workers = driver.pids(), driver.pool.workers()
        for i in range(8):
            driver.send([Ticket(i, [i + 1], 0)])
        driver.listen_until(lambda: samples.begun() == 2)
        os.kill(pids[0], signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert gone.worker in workers
        assert not gone.expected
        assert gone.pid == pids[0]
        assert gone.guilty is None or gone.guilty in gone.lost
        assert str(gone.pid) in gone.why
        assert driver.pool.crashes <= 1
        samples.let_go()
        driver.listen_until(lambda: {*driver.made, *driver.lost()} == set(range(8)))
        assert driver.lost()
        driver.wait_up(2)
        driver.make([[(number, [number + 1])] for number in driver.lost()])
        assert sorted(driver.made) == list(range(8))


def test_a_worker_killed_while_large_batches_are_on_their_way(main_node):
    with Driver(Large(), 2) as driver:
        driver.wait_up(2)
        for i in range(8):
            driver.send([Ticket(i, [i] * 200, 0)])
        driver.listen_until(lambda: driver.made)
        victim = driver.pids()[0]
        os.kill(victim, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert gone.pid == victim
        driver.listen_until(lambda: {*driver.made, *driver.lost()} == set(range(8)))
        driver.wait_up(2)
        driver.make([[(number, [number] * 200)] for number in driver.lost()])
        assert all((batch == i).all() for i, (batch,) in driver.made.items())


def test_the_deadly_ticket_of_a_group_is_found(main_node):
    with Driver(Deadly(), 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i], 0) for i in range(10, 20)])
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert gone.guilty == 13
        assert {*gone.lost, *driver.made} == set(range(10, 20))
        assert "SIGKILL" in gone.why or "Killed" in gone.why
        driver.listen_until(lambda: len(driver.of(WorkerUp)) == 2)
        driver.make([[(i, [i]) for i in gone.lost if i != 13]])
        assert sorted(driver.made) == [*range(10, 13), *range(14, 20)]


def test_a_killed_agent_loses_its_tickets_without_blame_and_is_replaced(main_node, tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 2) as driver:
        driver.wait_up(2)
        for i in range(8):
            driver.send([Ticket(i, [i + 1], 0)])
        driver.listen_until(lambda: samples.begun() == 2)
        (agent,) = driver.agent_processes()
        agent.kill()
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        assert not any(gone.expected or gone.guilty is not None for gone in driver.of(WorkerGone))
        assert not driver.made
        assert sorted(driver.lost()) == list(range(8))
        samples.let_go()
        driver.wait_up(2)
        driver.make([[(number, [number + 1])] for number in driver.lost()])
        assert agent.pid not in {one.pid for one in driver.agent_processes()}


def test_a_killed_guardian_takes_its_processes_along_and_is_replaced(main_node):
    with Driver(Numbers(), 2) as driver:
        driver.wait_up(2)
        pids = [*driver.pids(), *(agent.pid for agent in driver.agent_processes())]
        (node,) = driver.pool._nodes._nodes.values()
        os.kill(node.pid, signal.SIGKILL)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        driver.wait_up(2)
        driver.make(grouped(4, 1))
    until(lambda: not any(map(is_alive, pids)), DEADLINE_S)


TRAINING = """
import sys, threading, ray
sys.path[:] = {path!r}
import test_ray_pool
ray.init(address={address!r}, log_to_driver=False)
ray.cloudpickle.register_pickle_by_value(test_ray_pool)
driver = test_ray_pool.Driver(test_ray_pool.Numbers(), 2)
driver.wait_up(2)
print(*driver.pids(), *(agent.pid for agent in driver.agent_processes()), flush=True)
threading.Event().wait()
"""


def test_a_killed_training_process_leaves_nothing_behind(unshared):
    code = TRAINING.format(path=[str(Path(__file__).parent), *sys.path], address=unshared.address)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as training:
        pids = [*map(int, training.stdout.readline().split())]
        assert len(pids) == 3
        training.kill()
    until(lambda: not any(map(is_alive, pids)), DEADLINE_S)


def test_workers_leave_a_node_that_is_drained(cluster):
    either = {"num_cpus": 2, "resources": {"either": 2}}
    with (
        extra_node(cluster, **either) as first,
        extra_node(cluster, **either) as second,
        Driver(Slow(), 2, resources={"either": 1}) as driver,
    ):
        driver.wait_up(2)
        assert {node for _, node in driver.pool._nodes.agents} == {first.node_id, second.node_id}
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
        nodes = dict(driver.pool._nodes.agents)
        assert {nodes[agent.number] for agent in driver.agents() if agent.up} == {second.node_id}
        driver.listen_until(lambda: {*driver.made, *driver.lost()} == set(range(sent)))
        cluster.remove_node(first, allow_graceful=False)


class Visible:
    """Says which GPUs its worker sees, once two workers are asked; the first is asked whether a node can serve."""

    def __init__(self, place):
        self.place = place

    def __getitem__(self, index):
        if index:
            meet(self.place, 2)
        return os.environ["CUDA_VISIBLE_DEVICES"], os.getpid()


def test_a_worker_with_a_gpu_has_an_agent_of_its_own_that_sees_it(cluster, tmp_path):
    options = {"num_gpus": 1}
    with (
        extra_node(cluster, num_cpus=2, num_gpus=2, resources={"gpu node": 2}),
        Driver(
            Visible(tmp_path), 2, resources={"gpu node": 1}, options=options, collate_fn=same, auto_collation=False
        ) as driver,
    ):
        driver.wait_up(2)
        seen = set(driver.make(grouped(60, 1, lambda i: i + 1)).values())
        assert {devices for devices, _ in seen} == {"0", "1"}
        assert len(seen) == 2
        driver.pool.resize(1)
        driver.listen_until(lambda: driver.pool.counts.running == 1)
        assert [gone.expected for gone in driver.of(WorkerGone)] == [True]


def test_a_runtime_environment_is_that_of_the_agent_and_its_workers(main_node):
    options = {"runtime_env": {"env_vars": {"DPEX_TEST_NODE": "of its own"}}}
    with Driver(NodeBound(), 2, options=options, collate_fn=same, auto_collation=False) as driver:
        driver.wait_up(2)
        assert set(driver.make(grouped(4, 1, lambda i: i)).values()) == {"of its own"}
        assert len(driver.agents()) == 1


def test_a_runtime_environment_that_ray_refuses_is_told(main_node, tmp_path):
    options = {"runtime_env": {"working_dir": str(tmp_path)}}
    with Driver(Numbers(), 1, options=options) as driver:
        driver.listen_until(lambda: driver.pool.failed is not None)
        assert str(tmp_path) in driver.pool.failed


def test_a_removed_node_loses_its_tickets_without_blame(cluster, tmp_path):
    samples = HeldBack(tmp_path)
    with extra_node(cluster, num_cpus=2, resources={"doomed": 2}) as node:
        with Driver(samples, 2, resources={"doomed": 1}) as driver:
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


def test_a_node_that_leaves_is_to_blame_and_not_the_only_ticket_of_its_worker(cluster, tmp_path):
    doomed, samples = {"doomed": 1}, HeldBack(tmp_path)
    with (
        extra_node(cluster, num_cpus=1, resources=doomed) as node,
        Driver(samples, 1, resources=doomed) as driver,
    ):
        driver.wait_up(1)
        driver.send([Ticket(0, [1], 0)])
        driver.listen_until(samples.begun)
        cluster.remove_node(node, allow_graceful=True)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert (gone.lost, gone.guilty, gone.expected) == ((0,), None, False)


def test_the_only_ticket_of_a_killed_worker_is_to_blame(main_node, tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(0, [1], 0)])
        driver.listen_until(samples.begun)
        os.kill(*driver.pids(), signal.SIGKILL)
        driver.listen_until(lambda: driver.of(WorkerGone))
        (gone,) = driver.of(WorkerGone)
        assert (gone.lost, gone.guilty, gone.expected) == ((0,), 0, False)


@pytest.mark.parametrize("dataset", [NodeBound, FileBound])
def test_a_node_that_lacks_something_is_set_aside(cluster, dataset):
    bare = {"num_cpus": 2, "resources": {"probe": 2}, "env_vars": {"DPEX_TEST_NODE": "bare"}}
    good = {"num_cpus": 1, "resources": {"probe": 1}, "env_vars": {"DPEX_TEST_NODE": "good"}}
    driven = partial(Driver, dataset(), 3, resources={"probe": 1}, collate_fn=same, auto_collation=False)
    with extra_node(cluster, **bare) as bad_node, extra_node(cluster, **good), driven() as driver:
        driver.listen_until(lambda: driver.of(Notice) and driver.pool.counts.running == 1)
        (note,) = driver.of(Notice)
        assert note.warning
        assert "set aside" in note.text
        assert "rare_codec" in note.text or "/data/samples.bin" in note.text
        assert bad_node.node_id[:8] in note.text
        made = driver.make(grouped(20, 2, lambda i: i))
        assert set(made.values()) == {"good"}
        assert driver.pool.failed is None
        assert driver.pool.counts.requested == 3


def test_a_node_that_fails_repeatedly_is_left_alone_and_comes_back(cluster, monkeypatch):
    monkeypatch.setattr(failing_nodes, "WITHIN_S", 1000.0)
    monkeypatch.setattr(failing_nodes, "FIRST_S", 3.0)
    one = {"num_cpus": 1, "resources": {"flaky": 1}}
    driven = partial(Driver, Numbers(), 2, resources={"flaky": 1})
    with extra_node(cluster, **one) as bad, extra_node(cluster, **one), driven() as driver:

        def agent():
            (pid,) = [node.pid for node in driver.pool._nodes._nodes.values() if node.node == bad.node_id]
            return psutil.Process(pid).children()

        for _ in range(failing_nodes.FAILURES):
            driver.wait_up(2)
            until(agent)
            agent()[0].kill()
            driver.listen_until(lambda: driver.pool.counts.running < 2)
        seen = []
        driver.listen_until(lambda: seen or seen.extend(driver.pool.counts.failed.values()))
        (why,) = seen
        assert any("left alone" in note.text for note in driver.of(Notice))
        assert bad.node_id[:8] in why
        assert "its agent ended" in why
        driver.make(grouped(10, 2))
        driver.wait_up(2)
        assert not driver.pool.counts.left_alone


def test_when_no_node_serves_the_pool_says_so(main_node):
    with Driver(OnNoNode(), 2) as driver:
        driver.listen_until(lambda: driver.pool.failed is not None)
        assert "nowhere" in driver.pool.failed
        assert driver.pool.workers() == []
        assert driver.pool.counts.running == 0


def test_a_resource_that_no_node_has_is_said(main_node):
    with Driver(Numbers(), 1, resources={"unobtainium": 1}) as driver:
        driver.listen_until(lambda: driver.pool.failed is not None)
        assert "unobtainium" in driver.pool.failed


def test_large_arrays_are_shared_on_a_node_and_written_privately(main_node):
    dataset = Shared()
    with Driver(dataset, 2, collate_fn=same, auto_collation=False) as driver:
        driver.wait_up(2)
        by_pid = {}
        for begin in range(0, 240, 40):
            groups = [[(number, number)] for number in range(begin, begin + 40)]
            for array, tensor, maps, pid in driver.make(groups).values():
                by_pid.setdefault(pid, []).append((array, tensor))
                assert maps >= 1
            if len(by_pid) == 2:
                break  # else one of them was quick enough for all
    assert len(by_pid) == 2
    for values in by_pid.values():
        assert sorted(values) == [(i, i) for i in range(len(values))]
    assert dataset.array[7] == dataset.tensor[7] == 0


def test_streams(main_node):
    with Driver(Countdown(), 2, shared_queue=False, iterable=True, per_batch_seed=False) as driver:
        driver.wait_up(2)
        first, second = driver.pool.workers()
        driver.pool.adopt(first, 0, None)
        driver.pool.adopt(second, 1, None)
        made = driver.make([[(0, [None] * 2), (2, [None] * 2), (4, [None] * 2)]], worker=first)
        made |= driver.make([[(1, [None] * 3), (3, [None] * 3)]], worker=second, queue=1)
        assert made[0].tolist() == [[0, 0], [0, 1]]
        assert made[2].tolist() == [[0, 2]]
        assert made[1].tolist() == [[1, 0], [1, 1], [1, 2]]
        assert isinstance(made[3], StreamEnd)
        assert isinstance(made[4], StreamEnd)
        assert {event.number for event in driver.of(TicketMade) if event.stream_end} == {3, 4}


def test_a_logical_worker_moves_with_its_exact_random_state(main_node):
    torch_setup = {"per_batch_seed": False, "shared_queue": False}
    with Driver(Noise(), 2, **torch_setup) as driver:
        driver.wait_up(2)
        first, second = driver.pool.workers()
        driver.pool.adopt(first, 0, None)
        driver.pool.adopt(first, 1, None)
        still = driver.make([[(i, [i]) for i in range(10)]], worker=first)
    with Driver(Noise(), 2, **torch_setup) as driver:
        driver.wait_up(2)
        first, second = driver.pool.workers()
        driver.pool.adopt(first, 0, None)
        moved = driver.make([[(i, [i]) for i in range(4)]], worker=first)
        driver.pool.release(first, 0)
        driver.listen_until(lambda: driver.of(Released))
        (released,) = driver.of(Released)
        assert (released.logical, released.worker) == (0, first)
        driver.pool.adopt(second, 1, None)
        driver.pool.adopt(second, 0, released.state)
        moved |= driver.make([[(i, [i]) for i in range(4, 10)]], worker=second)
        driver.pool.dismiss(first)
        driver.listen_until(lambda: driver.of(WorkerGone))
        assert driver.pool.workers() == [second]
    assert all(torch.equal(still[i], moved[i]) for i in range(10))


def test_a_snapshot_replays_what_came_after_it(main_node):
    setup = {"per_batch_seed": False, "shared_queue": False}
    with Driver(Noise(), 1, **setup) as driver:
        driver.wait_up(1)
        (worker,) = driver.pool.workers()
        driver.pool.adopt(worker, 0, None)
        made = driver.make(grouped(1100, 100), worker=worker)
        driver.listen_until(lambda: driver.of(Snapshot))
        snapshot = driver.of(Snapshot)[0]
        assert (snapshot.logical, snapshot.epoch) == (0, 0)
        driver.pool.adopt(worker, 1, snapshot.state)
        after = snapshot.number + 1
        driver.send([Ticket(5000, [after], 1)], worker=worker)
        driver.listen_until(lambda: 5000 in driver.made)
        if after in made:
            # `adopt` seeds as worker 1, then takes over the state: only the state counts for what is drawn
            assert torch.equal(driver.made[5000][0], made[after])


def test_results_of_an_earlier_epoch_are_dropped(main_node, tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i + 1], 0) for i in range(3)], epoch=0)
        driver.listen_until(samples.begun)
        driver.pool.new_epoch(1)
        samples.let_go()
        made = driver.make([[(0, [100])]], epoch=1)
        assert made[0].tolist() == [100]
        assert [event.epoch for event in driver.of(TicketMade)] == [1]


def test_the_next_pool_gets_the_agents_with_the_dataset_as_it_is_then(unshared):
    share = connect("auto")
    try:
        dataset = [1, 2, 3]
        pids = []
        for value in (1, 100):
            dataset[0] = value
            with Driver(dataset, 2, auto_collation=False, collate_fn=same) as driver:
                driver.wait_up(2)
                assert driver.make(grouped(1, 1, lambda i: i))[0] == value
                pids.append({agent.pid for agent in driver.agent_processes()})
        assert pids[0] == pids[1]
        assert len(pids[0]) == 1
        assert share.parked.workers == 2
    finally:
        release(share)
    assert share.parked.workers == 0
    until(lambda: not any(map(is_alive, pids[0])), DEADLINE_S)


class Waiting:
    """Nodes that wait for a pool."""

    workers = 2

    def __init__(self, key):
        self.key = key
        self.has_ended = False

    def end(self):
        self.has_ended = True

    def join(self, timeout_s):
        assert self.has_ended


def test_parked_nodes_go_to_pools_with_the_same_options_once():
    parked = Parked()
    small, large = Waiting("small"), Waiting("large")
    for nodes in (small, large):
        parked.park(nodes)
    assert parked.workers == 4
    assert parked.take("none") is None
    assert parked.take("small") is small
    assert parked.take("small") is None
    assert parked.discard(large)
    assert not parked.discard(large)
    parked.park(small)
    parked.clear()
    assert (small.has_ended, large.has_ended) == (True, False)


def test_closing_in_the_middle_is_idempotent_and_leaves_no_process(unshared, tmp_path):
    samples = HeldBack(tmp_path)
    driver = Driver(samples, 2)
    driver.wait_up(2)
    pids = [*driver.pids(), *(agent.pid for agent in driver.agent_processes())]
    assert len(pids) == 3
    for i in range(4):
        driver.send([Ticket(i, [i + 1], 0)])
    driver.listen_until(lambda: samples.begun() == 2)
    driver.pool.close(5.0)
    driver.pool.close(5.0)
    assert not driver.pool.poll()
    samples.let_go()
    until(lambda: not any(map(is_alive, pids)), DEADLINE_S)


def test_what_cannot_travel_is_named(main_node):
    with pytest.raises(ShippingError, match=r"dataset\.handle \(a generator\) cannot be pickled"):
        Driver(Opaque(), 1)


def test_changed_collate_functions_travel(main_node, monkeypatch):
    from torch.utils.data._utils import collate

    monkeypatch.setitem(collate.default_collate_fn_map, int, lambda batch, *, collate_fn_map: sum(batch) + 1000)
    with Driver([1, 2, 3], 1) as driver:
        driver.wait_up(1)
        assert driver.make([[(0, [0, 1, 2])]])[0] == 1006
    monkeypatch.undo()
    with Driver([1, 2, 3], 1) as driver:
        driver.wait_up(1)
        assert driver.make([[(0, [0, 1, 2])]])[0].tolist() == [1, 2, 3]
