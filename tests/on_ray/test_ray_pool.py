"""The pool of remote workers on a real Ray cluster, driven with tickets: raylets of this machine are its nodes."""

import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from families import is_alive
from pool_driver import DEADLINE_S, Driver, HeldBack, NodeBound, Numbers, grouped, key_of, new_agents, same
from waiting import until

from dpex.errors import ShippingError
from dpex.pools.agent.connection import AdmissionServer
from dpex.pools.ray.cluster import living_nodes
from dpex.schedule.events import Notice, TicketMade, WorkerGone
from dpex.schedule.schedule import Ticket
from dpex.system.meter import private_bytes

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]
ASIDE = {"resources": {"aside": 1}}
"""For workers on the other node, of which no test expects parked agents."""


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


class FileBound:
    """Opens a file for each sample that exists on no other node."""

    def __getitem__(self, index):
        if os.environ.get("DPEX_TEST_NODE") == "bare":
            raise FileNotFoundError("/data/samples.bin")
        return os.environ.get("DPEX_TEST_NODE", "")


class Rows:
    """Sample: the sum over many objects, and the bytes of memory that the worker copied to read them."""

    def __init__(self, count):
        self.rows = [
            {"path": f"/data/{n:080d}.jpg", "label": n + 1000, "box": (n + 0.25, n + 0.5)} for n in range(count)
        ]

    def __getitem__(self, index):
        before = private_bytes([os.getpid()])
        total = sum(len(row["path"]) + row["label"] + sum(row["box"]) for row in self.rows)
        return total, private_bytes([os.getpid()]) - before


class Opaque:
    def __init__(self):
        self.handle = (i for i in range(3))


def test_growing_and_shrinking_while_it_works(tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 1) as driver:
        driver.wait_up(1)
        driver.send([Ticket(i, [i + 1], 0) for i in range(4)])
        driver.listen_until(lambda: samples.begun() == 1)
        driver.pool.resize(5)
        driver.wait_up(3)
        assert (driver.pool.counts.wanted, driver.pool.counts.requested, driver.pool.counts.running) == (5, 5, 3)
        driver.pool.resize(3)
        for i in range(4, 12, 2):
            driver.send([Ticket(i, [i + 1], 0), Ticket(i + 1, [i + 2], 0)])
        driver.listen_until(lambda: samples.begun() == 3)
        driver.pool.resize(1)
        assert not driver.made
        samples.let_go()
        driver.listen_until(lambda: len(driver.made) == 12 and driver.pool.counts.running == 1)
        gone = driver.of(WorkerGone)
        assert [(event.lost, event.expected) for event in gone] == [((), True)] * 2
        assert sorted(driver.made) == list(range(12))
        driver.pool.new_epoch(1)
        driver.send([Ticket(0, [7], 0)], epoch=0)  # of a pass that is over
        assert driver.make([[(13, [100])]], epoch=1)[13].tolist() == [100]
        assert [event.number for event in driver.of(TicketMade) if event.epoch == 1] == [13]


def test_a_killed_worker_loses_its_tickets_and_is_replaced(tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 2) as driver:
        driver.wait_up(2)
        pids, workers = driver.pids(), driver.pool.workers()
        for i in range(0, 8, 2):  # a worker has two messages at most
            driver.send([Ticket(i, [i + 1], 0), Ticket(i + 1, [i + 2], 0)])
        driver.listen_until(lambda: samples.begun() == 2)
        os.kill(pids[0], signal.SIGKILL)
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        gone, queued = driver.of(WorkerGone)
        assert (queued.worker, queued.expected) == (-1, True)
        assert gone.worker in workers
        assert not gone.expected
        assert gone.pid == pids[0]
        assert gone.working_on is None or gone.working_on in gone.lost
        assert str(gone.pid) in gone.why
        assert driver.pool.crashes <= 1
        samples.let_go()
        driver.listen_until(lambda: {*driver.made, *driver.lost()} == set(range(8)))
        assert driver.lost()
        driver.wait_up(2)
        driver.make([[(number, [number + 1])] for number in driver.lost()])
        assert sorted(driver.made) == list(range(8))


def test_a_killed_agent_is_replaced_and_no_ticket_is_suspected(tmp_path):
    samples = HeldBack(tmp_path)
    with Driver(samples, 2) as driver:
        driver.wait_up(2)
        for i in range(0, 8, 2):  # a worker has two messages at most
            driver.send([Ticket(i, [i + 1], 0), Ticket(i + 1, [i + 2], 0)])
        driver.listen_until(lambda: samples.begun() == 2)
        (agent,) = driver.agent_processes()
        agent.kill()
        driver.listen_until(lambda: len(driver.of(WorkerGone)) == 2)
        assert not any(gone.expected or gone.working_on is not None for gone in driver.of(WorkerGone))
        assert not driver.made
        assert sorted(driver.lost()) == list(range(8))
        samples.let_go()
        driver.wait_up(2)
        driver.make([[(number, [number + 1])] for number in driver.lost()])
        assert agent.pid not in {one.pid for one in driver.agent_processes()}


def test_large_arrays_are_shared_on_a_node_and_written_privately():
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


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12, which shares objects")
def test_workers_of_a_node_share_the_datasets_objects():
    dataset = Rows(20_000)
    with Driver(dataset, 2, collate_fn=same, auto_collation=False, shares_objects=True) as driver:
        driver.wait_up(2)
        made = driver.make([[(number, number)] for number in range(8)]).values()
    assert {total for total, _ in made} == {dataset[0][0]}
    assert max(copied for _, copied in made) < 1 << 20


def test_changed_collate_functions_travel(monkeypatch):
    from torch.utils.data._utils import collate

    monkeypatch.setitem(collate.default_collate_fn_map, int, lambda batch, *, collate_fn_map: sum(batch) + 1000)
    with Driver([1, 2, 3], 1) as driver:
        driver.wait_up(1)
        assert driver.make([[(0, [0, 1, 2])]])[0] == 1006
    monkeypatch.undo()
    with Driver([1, 2, 3], 1) as driver:
        driver.wait_up(1)
        assert driver.make([[(0, [0, 1, 2])]])[0].tolist() == [1, 2, 3]


def test_what_cannot_travel_is_named():
    with pytest.raises(ShippingError, match=r"dataset\.handle \(a generator\) cannot be pickled"):
        Driver(Opaque(), 1)


def test_the_next_pool_reuses_agents_with_the_current_dataset(shared_ray):
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
    parked = shared_ray.share.parked.take(key_of())
    assert parked.workers == 2
    shared_ray.share.parked.park(parked)


def test_pools_that_live_at_once_share_a_guardian_and_an_import():
    with Driver(Numbers(), 1, options=ASIDE) as one, Driver([5], 1, options=ASIDE, collate_fn=same) as other:
        one.wait_up(1)
        other.wait_up(1)
        assert list(one.make([[(0, [3])]])[0][0]) == [3.0] * 5
        assert other.make([[(0, [0])]])[0] == [5]
        (first,), (second,) = one.pool._nodes._nodes.values(), other.pool._nodes._nodes.values()
        assert first.guardian is second.guardian
        (agent,), (another,) = one.agent_processes(), other.agent_processes()
        assert agent.parent() == another.parent()
        agent.kill()
        one.listen_until(lambda: one.of(WorkerGone))
        one.wait_up(1)
        assert other.make([[(1, [0])]])[1] == [5]
        assert not other.of(WorkerGone)


def test_the_last_close_gives_back_room_and_keeps_agents(shared_ray):
    shared_ray.release()
    with Driver(Numbers(), 2) as driver:
        driver.wait_up(2)
        (agent,) = driver.agent_processes()
        nodes = driver.pool._nodes
    assert nodes.workers == 0
    with Driver(Numbers(), 2) as driver:
        driver.wait_up(2)
        assert driver.agent_processes() == [agent]


def test_a_node_that_cannot_reach_the_trainer_says_so(monkeypatch):
    """Nothing listens at the port that the agents get."""
    monkeypatch.setattr("dpex.pools.ray.nodes.AdmissionServer", Deaf)
    with new_agents(ASIDE), Driver(Numbers(), 1, options=ASIDE) as driver:
        driver.listen_until(lambda: driver.pool.failed is not None)
        assert "it cannot reach the trainer at" in driver.pool.failed


class Deaf(AdmissionServer):
    """Says that it listens where nobody does."""

    def __init__(self, address, admit):
        super().__init__(address, admit)
        self.port = 1


def test_a_resource_that_no_node_has_is_said():
    with Driver(Numbers(), 1, options={"resources": {"unobtainium": 1}}) as driver:
        driver.listen_until(lambda: driver.pool.failed is not None)
        assert "unobtainium" in driver.pool.failed


@pytest.mark.parametrize("dataset", [NodeBound, FileBound])
def test_a_node_that_lacks_something_is_told_with_the_remedy(dataset):
    driven = partial(Driver, dataset(), 3, options={"resources": {"probe": 1}}, collate_fn=same, auto_collation=False)
    with driven() as driver:
        driver.listen_until(lambda: driver.of(Notice) and driver.pool.counts.running == 1)
        (note,) = driver.of(Notice)
        assert note.warning
        assert "rare_codec" in note.text or "/data/samples.bin" in note.text
        assert "runtime_env" in note.text
        (bad_node,) = [node["NodeID"] for node in living_nodes() if node["Resources"].get("probe") == 2]
        assert bad_node[:8] in note.text
        made = driver.make(grouped(20, 2, lambda i: i))
        assert set(made.values()) == {"good"}
        assert driver.pool.failed is None
        assert driver.pool.counts.requested == 3


def test_a_runtime_environment_applies_to_agent_and_workers():
    options = {**ASIDE, "runtime_env": {"env_vars": {"DPEX_TEST_NODE": "of its own"}}}
    with Driver(NodeBound(), 2, options=options, collate_fn=same, auto_collation=False) as driver:
        driver.wait_up(2)
        assert set(driver.make(grouped(4, 1, lambda i: i)).values()) == {"of its own"}
        assert len(driver.agents()) == 1


def test_a_runtime_environment_that_ray_refuses_is_told(tmp_path):
    options = {**ASIDE, "runtime_env": {"working_dir": str(tmp_path)}}
    with Driver(Numbers(), 1, options=options) as driver:
        driver.listen_until(lambda: driver.pool.failed is not None)
        assert str(tmp_path) in driver.pool.failed


TRAINING = """
import sys, threading, ray
sys.path[:] = {path!r}
import pool_driver
ray.init(address={address!r}, log_to_driver=False)
ray.cloudpickle.register_pickle_by_value(pool_driver)
driver = pool_driver.Driver(pool_driver.Numbers(), 2, options={options!r})
driver.wait_up(2)
print(*driver.pids(), *(agent.pid for agent in driver.agent_processes()), flush=True)
threading.Event().wait()
"""


def test_a_killed_training_process_leaves_nothing_behind(shared_ray):
    code = TRAINING.format(path=[str(Path(__file__).parent), *sys.path], address=shared_ray.address, options=ASIDE)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as training:
        pids = [*map(int, training.stdout.readline().split())]
        assert len(pids) == 3
        training.kill()
    until(lambda: not any(map(is_alive, pids)), DEADLINE_S)


def test_closing_in_mid_epoch_is_idempotent_and_ends_processes(shared_ray, tmp_path):
    """Nobody else holds a share of the connection, for which agents would be parked."""
    shared_ray.release()
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
