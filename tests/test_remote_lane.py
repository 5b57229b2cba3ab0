"""The remote lane on a real Ray cluster: several raylets on this machine, driven with tickets, without a loader."""

import contextlib
import os
import random
import select
import signal
import socket
import time
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch.utils.data import default_collate, get_worker_info

from dpex.core.schedule import Ticket
from dpex.errors import ShippingError
from dpex.pools.base import Gone, Made, Note, Released, Snapshot, Up
from dpex.pools.ray.results import Inbox
from dpex.worker.core import Failure, StreamEnd, WorkerCore, WorkerSetup

pytestmark = [pytest.mark.ray, pytest.mark.timeout(240)]

ray = pytest.importorskip("ray")
DEADLINE_S = 120
STORE_BYTES = 300 << 20


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
        return (*before, maps.count("dpex-parcel"), os.getpid())


class Faulty:
    def __getitem__(self, index):
        return torch.tensor(1 // (index % 3))


class Deadly:
    def __getitem__(self, index):
        if index == 13:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.tensor(index)


class Slow:
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.tensor(index)


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


class Homeless:
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
    import sys

    from ray.cluster_utils import Cluster

    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])
    quiet = {"include_dashboard": False, "object_store_memory": STORE_BYTES}
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, **quiet})
    made.add_node(num_cpus=3, resources={"main": 100}, object_store_memory=STORE_BYTES)
    ray.init(address=made.address, log_to_driver=False, logging_level="ERROR")
    yield made
    ray.shutdown()
    made.shutdown()
    ray.cloudpickle.unregister_pickle_by_value(sys.modules[__name__])


@contextlib.contextmanager
def extra_node(cluster, **options):
    node = cluster.add_node(object_store_memory=STORE_BYTES, **options)
    cluster.wait_for_nodes()
    try:
        yield node
    finally:
        if node in cluster.worker_nodes:
            cluster.remove_node(node, allow_graceful=True)
        until(lambda: sum(n["Alive"] for n in ray.nodes()) == len(cluster.list_all_nodes()))


def until(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        select.select([], [], [], 0.05)


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

    def __init__(self, dataset, hosts, *, shared_queue=True, resources=None, **setup):
        from dpex.pools.ray.pool import RemoteLane

        self.lane = RemoteLane(
            setup_of(dataset, **setup),
            head_address="auto",
            worker_resources=resources or {"main": 1},
            runtime_env=None,
            shared_queue=shared_queue,
            first_hosts=hosts,
            probe_index=0,
        )
        self.events = []
        self.made = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.lane.close(5.0)

    def listen_until(self, condition):
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, self.events
            select.select(self.lane.descriptors(), [], [], 1.0)
            heard = self.lane.poll()
            while heard:
                event = heard.popleft()
                self.events.append(event)
                if isinstance(event, Made):
                    self.made.setdefault(event.number, []).append(event.value())

    def of(self, kind):
        return [event for event in self.events if isinstance(event, kind)]

    def wait_up(self, hosts):
        self.listen_until(lambda: self.lane.counts.running >= hosts)

    def send(self, tickets, epoch=0, host=None):
        def sent():
            return self.lane.send(tickets, epoch, host)

        self.listen_until(sent)

    def make(self, groups, epoch=0, host=None, queue=0):
        """Groups of (number, index) pairs, all delivered."""
        for group in groups:
            self.send([Ticket(number, index, queue) for number, index in group], epoch, host)
        numbers = {number for group in groups for number, _ in group}
        self.listen_until(lambda: numbers <= self.made.keys())
        return {number: self.made[number][0] for number in sorted(numbers)}


def grouped(count, size, index=lambda i: [i]):
    pairs = [(i, index(i)) for i in range(count)]
    return [pairs[i : i + size] for i in range(0, count, size)]


@pytest.fixture
def main_node(cluster):
    """The node that stays."""
    return cluster


def test_small_batches_travel_in_groups_and_are_right(main_node):
    with Driver(Numbers(), 2) as driver:
        driver.wait_up(2)
        made = driver.make(grouped(500, 32))
        assert all(torch.equal(batch, torch.full((1, 5), float(i))) for i, batch in made.items())
        assert driver.lane.times.tickets == 500
        assert len(driver.lane.hosts()) == driver.lane.counts.running == 2
        assert len({event.host for event in driver.of(Made)}) == 2


@pytest.mark.parametrize("way", ["stream", "store", "unreachable"])
def test_large_batches_are_ordinary_writable_tensors_that_last(main_node, monkeypatch, way):
    if way == "store":
        monkeypatch.setattr("dpex.pools.ray.pool.stream_address", lambda: None)
    elif way == "unreachable":
        target = Inbox.target
        monkeypatch.setattr(Inbox, "target", lambda inbox, host: target(inbox, host)._replace(port=1))
    with Driver(Large(), 1) as driver:
        driver.wait_up(1)
        made = driver.make(grouped(12, 1, lambda i: [i] * 8))
        assert len(links(driver)) == (way == "stream")
        notes = [note.text for note in driver.of(Note)]
        assert len(notes) == (way == "unreachable")
        assert all("object store: it cannot reach" in note for note in notes)
    for i, batch in made.items():
        assert batch.shape == (8, 3, 128, 128)
        assert type(batch) is torch.Tensor
        assert (batch == i).all()
        batch += 1
    assert all((batch == i + 1).all() for i, batch in made.items())


def links(driver):
    """Connections that hosts have made."""
    receiver = driver.lane._inbox._receiver
    return receiver._links if receiver is not None else {}


def test_a_broken_connection_costs_its_host_and_nothing_else(main_node):
    with Driver(Large(), 1) as driver:
        driver.wait_up(1)
        driver.make([[(0, [0])]])
        (link,) = links(driver).values()
        link.connection.shutdown(socket.SHUT_RDWR)
        for i in range(1, 5):
            driver.send([Ticket(i, [i] * 8, 0)])
        driver.listen_until(lambda: len(driver.made) == 5 or driver.of(Gone))
        for gone in driver.of(Gone):
            assert "the connection that carried its batches broke" in gone.why
            assert gone.guilty is None
            assert not gone.expected
            driver.wait_up(1)
            driver.make([[(number, [number] * 8)] for number in gone.lost])
            assert any("object store" in note.text for note in driver.of(Note))
        driver.make([[(5, [5] * 8)]])
        assert sorted(driver.made) == list(range(6))
        assert not links(driver) or link.broken
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


def test_growing_and_shrinking_while_it_works(main_node):
    with Driver(Slow(), 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i], 0) for i in range(4)])
        driver.lane.resize(3)
        assert driver.lane.counts.wanted == 3
        driver.wait_up(3)
        for i in range(4, 12):
            driver.send([Ticket(i, [i], 0)])
        driver.lane.resize(1)
        driver.listen_until(lambda: len(driver.made) == 12 and driver.lane.counts.running == 1)
        gone = driver.of(Gone)
        assert [(event.lost, event.expected) for event in gone] == [((), True)] * 2
        assert sorted(driver.made) == list(range(12))
        driver.make([[(12, [12])]])


def test_requests_beyond_the_cluster_stay_pending(main_node):
    with Driver(Numbers(), 5) as driver:
        driver.wait_up(3)
        driver.make(grouped(10, 1))
        assert (driver.lane.counts.wanted, driver.lane.counts.requested, driver.lane.counts.running) == (5, 5, 3)
        driver.lane.resize(3)
        assert driver.lane.counts.requested == 3


def test_an_error_looks_as_from_torch(main_node):
    with Driver(Faulty(), 1) as driver:
        driver.wait_up(1)
        made = driver.make(grouped(6, 6))
        assert torch.equal(made[1], torch.tensor([1]))
        failure = made[3]
        assert isinstance(failure, Failure)
        with pytest.raises(ZeroDivisionError, match=r"Caught ZeroDivisionError in DataLoader worker process 0"):
            failure.wrapper.reraise()


def test_a_killed_actor_loses_its_tickets_and_is_replaced(main_node):
    with Driver(Slow(), 2) as driver:
        driver.wait_up(2)
        pids = {host.number: host.actor.pid for host in driver.lane._hosts.values()}
        for i in range(8):
            driver.send([Ticket(i, [i], 0)])
        victim = driver.lane.hosts()[0]
        os.kill(pids[victim], signal.SIGKILL)
        driver.listen_until(lambda: driver.of(Gone))
        (gone,) = driver.of(Gone)
        assert gone.host == victim
        assert not gone.expected
        assert gone.pid == pids[victim]
        assert gone.lost
        assert gone.guilty == (gone.lost[0] if len(gone.lost) == 1 else None)
        assert str(gone.pid) in gone.why
        assert driver.lane.crashes <= 1
        driver.listen_until(lambda: len(driver.made) + len(gone.lost) == 8)
        driver.wait_up(2)
        driver.make([[(number, [number])] for number in gone.lost])
        assert sorted(driver.made) == list(range(8))


def test_an_actor_killed_while_large_batches_are_on_their_way(main_node):
    with Driver(Large(), 2) as driver:
        driver.wait_up(2)
        for i in range(8):
            driver.send([Ticket(i, [i] * 200, 0)])
        driver.listen_until(lambda: driver.made)
        victim = next(host for host in driver.lane._hosts.values() if host.calls)
        os.kill(victim.actor.pid, signal.SIGKILL)
        driver.listen_until(lambda: driver.of(Gone))
        (gone,) = driver.of(Gone)
        assert gone.pid == victim.actor.pid
        driver.listen_until(lambda: len(driver.made) + len(gone.lost) == 8)
        driver.wait_up(2)
        driver.make([[(number, [number] * 200)] for number in gone.lost])
        assert all((batch == i).all() for i, (batch,) in driver.made.items())


def test_the_deadly_ticket_of_a_group_is_found(main_node):
    with Driver(Deadly(), 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i], 0) for i in range(10, 20)])
        driver.listen_until(lambda: len(driver.of(Gone)) == 1)
        assert driver.of(Gone)[0].guilty is None
        assert driver.of(Gone)[0].lost == tuple(range(10, 20))
        driver.listen_until(lambda: len(driver.of(Up)) == 2)
        driver.send([Ticket(i, [i], 0) for i in range(10, 20)])
        driver.listen_until(lambda: len(driver.of(Gone)) == 2)
        assert driver.of(Gone)[1].guilty == 13
        assert sorted(driver.made) == [10, 11, 12]


def test_a_removed_node_loses_its_tickets_without_blame(cluster):
    with extra_node(cluster, num_cpus=2, resources={"doomed": 2}) as node:
        with Driver(Slow(), 2, resources={"doomed": 1}) as driver:
            driver.wait_up(2)
            os.kill(node.all_processes["raylet"][0].process.pid, signal.SIGKILL)
            sent = 0

            def both_gone():
                nonlocal sent
                if driver.lane.slots() and driver.lane.send([Ticket(sent, [sent], 0)], 0):
                    sent += 1
                return len(driver.of(Gone)) == 2

            driver.listen_until(both_gone)
            lost = [number for gone in driver.of(Gone) for number in gone.lost]
            assert sorted([*driver.made, *lost]) == list(range(sent))
            assert lost
            assert not any(gone.expected for gone in driver.of(Gone))
            assert driver.lane.counts.running == 0
            driver.listen_until(lambda: driver.lane.failed is not None)
        cluster.remove_node(node, allow_graceful=False)


@pytest.mark.parametrize("dataset", [NodeBound, FileBound])
def test_a_node_that_lacks_something_is_set_aside(cluster, dataset):
    bare = {"num_cpus": 2, "resources": {"probe": 2}, "env_vars": {"DPEX_TEST_NODE": "bare"}}
    good = {"num_cpus": 1, "resources": {"probe": 1}, "env_vars": {"DPEX_TEST_NODE": "good"}}
    driven = partial(Driver, dataset(), 3, resources={"probe": 1}, collate_fn=same, auto_collation=False)
    with extra_node(cluster, **bare) as bad_node, extra_node(cluster, **good), driven() as driver:
        driver.listen_until(lambda: driver.of(Note) and driver.lane.counts.running == 1)
        (note,) = driver.of(Note)
        assert note.warning
        assert "set aside" in note.text
        assert "rare_codec" in note.text or "/data/samples.bin" in note.text
        assert bad_node.node_id[:8] in note.text
        made = driver.make(grouped(20, 2, lambda i: i))
        assert set(made.values()) == {"good"}
        assert driver.lane.failed is None
        assert driver.lane.counts.requested == 3


def test_when_no_node_serves_the_lane_says_so(main_node):
    with Driver(Homeless(), 2) as driver:
        driver.listen_until(lambda: driver.lane.failed is not None)
        assert "nowhere" in driver.lane.failed
        assert driver.lane.hosts() == []
        assert driver.lane.counts.running == 0


def test_a_resource_that_no_node_has_is_said(main_node):
    with Driver(Numbers(), 1, resources={"unobtainium": 1}) as driver:
        driver.listen_until(lambda: driver.lane.failed is not None)
        assert "unobtainium" in driver.lane.failed


def test_large_arrays_are_shared_on_a_node_and_written_privately(main_node):
    dataset = Shared()
    with Driver(dataset, 2, collate_fn=same, auto_collation=False) as driver:
        driver.wait_up(2)
        made = driver.make(grouped(40, 1, lambda i: i))
    by_pid = {}
    for array, tensor, maps, pid in made.values():
        by_pid.setdefault(pid, []).append((array, tensor))
        assert maps >= 1
    assert len(by_pid) == 2
    for values in by_pid.values():
        assert sorted(values) == [(i, i) for i in range(len(values))]
    assert dataset.array[7] == dataset.tensor[7] == 0


def test_streams(main_node):
    with Driver(Countdown(), 2, shared_queue=False, iterable=True, per_batch_seed=False) as driver:
        driver.wait_up(2)
        first, second = driver.lane.hosts()
        driver.lane.adopt(first, 0, None)
        driver.lane.adopt(second, 1, None)
        made = driver.make([[(0, [None] * 2), (2, [None] * 2), (4, [None] * 2)]], host=first)
        made |= driver.make([[(1, [None] * 3), (3, [None] * 3)]], host=second, queue=1)
        assert made[0].tolist() == [[0, 0], [0, 1]]
        assert made[2].tolist() == [[0, 2]]
        assert made[1].tolist() == [[1, 0], [1, 1], [1, 2]]
        assert isinstance(made[3], StreamEnd)
        assert isinstance(made[4], StreamEnd)
        assert {event.number for event in driver.of(Made) if event.stream_end} == {3, 4}


def test_a_logical_worker_moves_with_its_exact_random_state(main_node):
    torch_setup = {"per_batch_seed": False, "shared_queue": False}
    with Driver(Noise(), 2, **torch_setup) as driver:
        driver.wait_up(2)
        first, second = driver.lane.hosts()
        driver.lane.adopt(first, 0, None)
        driver.lane.adopt(first, 1, None)
        still = driver.make([[(i, [i]) for i in range(10)]], host=first)
    with Driver(Noise(), 2, **torch_setup) as driver:
        driver.wait_up(2)
        first, second = driver.lane.hosts()
        driver.lane.adopt(first, 0, None)
        moved = driver.make([[(i, [i]) for i in range(4)]], host=first)
        driver.lane.release(first, 0)
        driver.listen_until(lambda: driver.of(Released))
        (released,) = driver.of(Released)
        assert (released.logical, released.host) == (0, first)
        driver.lane.adopt(second, 1, None)
        driver.lane.adopt(second, 0, released.state)
        moved |= driver.make([[(i, [i]) for i in range(4, 10)]], host=second)
        driver.lane.dismiss(first)
        driver.listen_until(lambda: driver.of(Gone))
        assert driver.lane.hosts() == [second]
    assert all(torch.equal(still[i], moved[i]) for i in range(10))


def test_a_snapshot_replays_what_came_after_it(main_node):
    setup = {"per_batch_seed": False, "shared_queue": False}
    with Driver(Noise(), 1, **setup) as driver:
        driver.wait_up(1)
        (host,) = driver.lane.hosts()
        driver.lane.adopt(host, 0, None)
        made = driver.make(grouped(1100, 100), host=host)
        snapshot = driver.of(Snapshot)[0]
        assert (snapshot.logical, snapshot.epoch) == (0, 0)
        driver.lane.adopt(host, 1, snapshot.state)
        after = snapshot.number + 1
        driver.send([Ticket(5000, [after], 1)], host=host)
        driver.listen_until(lambda: 5000 in driver.made)
        if after in made:
            # `adopt` seeds as worker 1, then takes over the state: only the state counts for what is drawn
            assert torch.equal(driver.made[5000][0], made[after])


def test_results_of_an_earlier_epoch_are_dropped(main_node):
    with Driver(Slow(), 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i], 0) for i in range(3)], epoch=0)
        driver.lane.new_epoch(1)
        made = driver.make([[(0, [100])]], epoch=1)
        assert made[0].tolist() == [100]
        assert [event.epoch for event in driver.of(Made)] == [1]


def test_the_next_lane_gets_prepared_processes_with_the_dataset_as_it_is_then(main_node):
    from dpex.pools.ray.cluster import connect, release

    share = connect("auto")
    try:
        dataset = [1, 2, 3]
        pids = []
        for value in (1, 100):
            dataset[0] = value
            with Driver(dataset, 2, auto_collation=False, collate_fn=same) as driver:
                driver.wait_up(2)
                assert driver.make(grouped(1, 1, lambda i: i))[0] == value
                pids.append({host.actor.pid for host in driver.lane._hosts.values()})
        assert pids[0] == pids[1]
        assert len(share.pool) == 2
    finally:
        release(share)
    assert len(share.pool) == 0
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids[0]))  # noqa: PTH110


def test_closing_in_the_middle_is_quick_idempotent_and_leaves_no_actor(main_node):
    driver = Driver(Slow(), 2)
    driver.wait_up(2)
    pids = [host.actor.pid for host in driver.lane._hosts.values()]
    for i in range(4):
        driver.send([Ticket(i, [i], 0)])
    driver.lane.close(5.0)
    driver.lane.close(5.0)
    assert not driver.lane.poll()
    until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))  # noqa: PTH110


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
