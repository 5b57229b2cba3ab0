"""Drive the pool of remote workers with tickets, without a loader: datasets, a driver, and ways to be connected."""

import contextlib
import json
import os
import select
import time

import psutil
import torch
from families import setup_of
from waiting import until
from workload import wait_as_work

from dpex.pools.ray.cluster import connect, release
from dpex.pools.ray.room import worker_options
from dpex.schedule.events import TicketMade, WorkerGone
from dpex.schedule.schedule import Ticket

DEADLINE_S = 120


class Numbers:
    def __getitem__(self, index):
        return torch.full((5,), float(index))


class Large:
    def __getitem__(self, index):
        return torch.full((3, 128, 128), float(index))


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


def same(value):
    return value


def remote_args(options=None):
    """What a worker asks of Ray: a place on the node "main", if ``options`` name no other, and no CPU, so that parked
    agents of loaders have the CPUs."""
    return {"num_cpus": 0, "resources": {"main": 1}, **(options or {})}


def key_of(options=None):
    """Under which agents for workers with these options are parked."""
    return json.dumps(worker_options(remote_args(options)), sort_keys=True, default=repr)


class Driver:
    """Stands in for the engine: sends tickets, collects what happens."""

    def __init__(self, dataset, workers, *, shared_queue=True, options=None, **setup):
        from dpex.pools.ray.nodes import ray_pool

        self.pool = ray_pool(
            setup_of(dataset, per_batch_seed=True, **setup),
            "auto",
            remote_args(options),
            shared_queue=shared_queue,
            first_workers=workers,
            probes=True,
        )
        self.events = []
        self.made = {}

    def agents(self):
        return list(self.pool._agents.values())

    def agent_processes(self):
        """Of all nodes, those that are connected to this pool; pools share guardians."""
        nodes = self.pool._nodes
        found = [agent for node in nodes._nodes.values() for agent in agents_of(node.pid)]
        return [agent for agent in found if nodes._server.port in peers_of(agent)]

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


def peers_of(process):
    """Ports to which a process is connected."""
    return {one.raddr.port for one in process.net_connections("tcp") if one.raddr}


def agents_of(guardian):
    """The children of a guardian's agent server, its only child."""
    return [agent for server in psutil.Process(guardian).children() for agent in server.children()]


def grouped(count, size, index=lambda i: [i]):
    pairs = [(i, index(i)) for i in range(count)]
    return [pairs[i : i + size] for i in range(0, count, size)]


@contextlib.contextmanager
def new_agents(options=None):
    """Agents for workers with these options are started anew within, and serve no test after it."""
    share = connect("auto")
    try:
        end_parked(share, options)
        yield
    finally:
        end_parked(share, options)
        release(share)


def end_parked(share, options=None):
    """End the agents that wait for workers with these options."""
    while (nodes := share.parked.take(key_of(options))) is not None:
        nodes.end()
        nodes.join(DEADLINE_S)
