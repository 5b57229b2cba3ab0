"""The faults: each is made to happen to a real training, which is watched until all is as it was before."""

import signal
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import psutil

from benchmarks.drills.trainer import BATCH, Work
from benchmarks.drills.watched import AFTER, PATIENCE_S, Watched
from benchmarks.network.links import Link, Network
from benchmarks.process import MeasurementError
from dpex.system.clock import monotonic

STILL_S = 3.0
"""How long a process stands still, or a node is cut off."""
SAMPLE_TIMEOUT_S = 1.0
HANGS = 400
"""The number of a sample that hangs: batches before it are made by all workers."""
LOOK_S = 0.005
LINK = Link(bits_per_s=1e9, round_trip_s=0.001)
STORE_BYTES = 200 << 20
NODE_CPUS = 2


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one fault cost.

    seconds: from the fault until all was as before. wait_s: the longest time without a batch from then on, None where
    the training is what ended. lost, repeated: samples.
    """

    seconds: float
    wait_s: float | None
    lost: int
    repeated: int


class Scene:
    """A Ray cluster on this machine: a head without CPUs, and nodes that may be killed. Started when it is needed."""

    def __init__(self, nodes: int = 2) -> None:
        self._count = nodes
        self._cluster: Any = None

    @property
    def cluster(self) -> Any:
        """As it should be, also after a drill that took nodes away."""
        if self._cluster is None:
            from ray.cluster_utils import Cluster

            head = {"num_cpus": 0, "object_store_memory": STORE_BYTES, "include_dashboard": False}
            self._cluster = Cluster(initialize_head=True, head_node_args=head)
        while len(self._cluster.worker_nodes) < self._count:
            self._cluster.add_node(num_cpus=NODE_CPUS, object_store_memory=STORE_BYTES)
        return self._cluster

    def work(self, workers: int) -> Work:
        """So many workers on its nodes."""
        return Work(place="cluster", workers=workers, address=self.cluster.address)

    def close(self) -> None:
        """End it. Idempotent."""
        if self._cluster is not None:
            self._cluster.shutdown()
            self._cluster = None


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A fault as the table of drills has it, and what makes it happen. until: what the seconds are until. needs: what
    a machine may lack."""

    fault: str
    until: Literal["all workers run", "the next batch", "nothing is left", "its batch", "a local worker runs"]
    make: Callable[[Scene], Outcome]
    needs: Literal["", "ray", "network"] = ""


def outcome(training: Watched, began_at: float, ended_at: float) -> Outcome:
    """Of a training that goes on; it is ended."""
    training.take(AFTER)
    if code := training.finish():
        raise MeasurementError(f"it ended with code {code}: {training.errors()}")
    return Outcome(
        seconds=ended_at - began_at,
        wait_s=training.longest_wait_s(began_at),
        lost=training.lost,
        repeated=training.repeated,
    )


def until_it_recovers(training: Watched, fault: Callable[[], None], workers: int) -> Outcome:
    """Make a fault happen that costs workers, and wait until all run again."""
    deaths, began_at = training.deaths, monotonic()
    fault()
    back = training.until_batch(lambda told: told.deaths > deaths and told.all_running >= workers, began_at)
    return outcome(training, began_at, back.at)


# -- what is killed ----------------------------------------------------------------------------------------------------


def killed(work: Callable[[Scene], Work], victim: str) -> Callable[[Scene], Outcome]:
    """SIGKILL to one process of that kind."""

    def make(scene: Scene) -> Outcome:
        with Watched(work(scene)) as training:
            workers = training.until_all_run()
            process = psutil.Process(training.victims[victim][0])
            return until_it_recovers(training, process.kill, workers)

    return make


def training_killed(work: Callable[[Scene], Work], kinds: Sequence[str]) -> Callable[[Scene], Outcome]:
    """SIGKILL to the training process; until none of its processes is left."""

    def make(scene: Scene) -> Outcome:
        with Watched(work(scene)) as training:
            training.until_all_run()
            family = [psutil.Process(pid) for kind in kinds for pid in training.victims[kind]]
            began_at = monotonic()
            training.process.kill()
            wait_until(lambda: not any(is_running(process) for process in family))
            return Outcome(seconds=monotonic() - began_at, wait_s=None, lost=0, repeated=0)

    return make


def is_running(process: psutil.Process) -> bool:
    """Whether it is there, and no zombie."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(true: Callable[[], bool]) -> None:
    """Look again and again. Raises MeasurementError when patience ends."""
    deadline = monotonic() + PATIENCE_S
    while not true():
        if monotonic() > deadline:
            raise MeasurementError(f"waited {PATIENCE_S:g} s in vain")
        threading.Event().wait(LOOK_S)


def kill_raylets(nodes: Sequence[Any]) -> None:
    """SIGKILL to the raylets of these nodes; what runs there follows."""
    for node in nodes:
        for raylet in node.all_processes["raylet"]:
            psutil.Process(raylet.process.pid).send_signal(signal.SIGKILL)


def raylet_killed(scene: Scene) -> Outcome:
    """SIGKILL to the raylet of one of two nodes."""
    cluster = scene.cluster
    node = next(iter(cluster.worker_nodes))
    with Watched(scene.work(NODE_CPUS)) as training:
        workers = training.until_all_run()
        try:
            return until_it_recovers(training, lambda: kill_raylets([node]), workers)
        finally:
            cluster.remove_node(node, allow_graceful=False)


def node_removed(scene: Scene) -> Outcome:
    """One of two nodes goes, with all that is on it."""
    cluster = scene.cluster
    node = next(iter(cluster.worker_nodes))
    with Watched(scene.work(NODE_CPUS)) as training:
        workers = training.until_all_run()
        return until_it_recovers(training, lambda: cluster.remove_node(node, allow_graceful=True), workers)


def all_nodes_killed(scene: Scene) -> Outcome:
    """SIGKILL to all raylets but that of the head; until the first local worker runs."""
    cluster = scene.cluster
    nodes = list(cluster.worker_nodes)
    with Watched(scene.work(NODE_CPUS)) as training:
        training.until_all_run()
        began_at = monotonic()
        try:
            kill_raylets(nodes)
            back = training.until_batch(lambda told: told.running.get("local", 0) > 0, began_at)
        finally:
            for node in nodes:
                cluster.remove_node(node, allow_graceful=False)
        return outcome(training, began_at, back.at)


# -- what stands still -------------------------------------------------------------------------------------------------


def stood_still(work: Work, *, with_workers: bool) -> Callable[[Scene], Outcome]:
    """The training process stands still for a while, alone or with all that it has started."""

    def make(_: Scene) -> Outcome:
        with Watched(work) as training:
            training.until_all_run()
            trainer = psutil.Process(training.process.pid)
            stopped = [trainer, *(trainer.children(recursive=True) if with_workers else ())]
            return after_a_stop(training, stopped)

    return make


def agent_stood_still(_: Scene) -> Outcome:
    """The agent of a node stands still for a while; its workers wait for it."""
    with Network([LINK]) as network, behind(network) as training:
        training.until_all_run()
        return after_a_stop(training, [psutil.Process(training.victims["agent"][0])])


def after_a_stop(training: Watched, processes: Sequence[psutil.Process]) -> Outcome:
    """SIGSTOP, and SIGCONT after a while: from then until the next batch."""
    for process in processes:
        process.suspend()
    threading.Event().wait(STILL_S)
    training.hear()
    began_at = monotonic()
    for process in reversed(processes):
        process.resume()
    return outcome(training, began_at, training.until_batch(lambda _: True, began_at).at)


def hung(_: Scene) -> Outcome:
    """A sample hangs when it is first loaded: from then until its batch is there."""
    with tempfile.TemporaryDirectory() as folder:
        noted = Path(folder) / "hung"
        work = Work(hangs=HANGS, noted=str(noted), options={"sample_timeout_s": SAMPLE_TIMEOUT_S})
        with Watched(work) as training:
            came = training.until_batch(lambda told: HANGS in told.batch, 0.0)
            return outcome(training, float(noted.read_text()), came.at)


# -- the network -------------------------------------------------------------------------------------------------------


def behind(network: Network) -> Watched:
    """A training with two workers behind a link, and one beside it."""
    where: dict[str, Any] = {"nodes": tuple(network.nodes), "reached_at": tuple(network.address)}
    work = Work(place="agents", workers=2, also_local=1, **where)
    return Watched(work, enter=network.enter(network.trainer))


def cut_off_for_a_while(_: Scene) -> Outcome:
    """No packet gets through for a while: from the end of that until a batch of that node is there."""
    with Network([LINK]) as network, behind(network) as training:
        training.until_all_run()
        network.set(0, replace(LINK, loss=1.0))
        threading.Event().wait(STILL_S)
        training.hear()
        made, began_at = training.made_by("remote"), monotonic()
        network.set(0, LINK)
        back = training.until_batch(lambda told: told.made["remote"] > made, began_at)
        return outcome(training, began_at, back.at)


def cut_off_for_good(_: Scene) -> Outcome:
    """No packet gets through any more: until the batches of that node are made here."""
    with Network([LINK]) as network, behind(network) as training:
        workers = training.until_all_run()
        network.set(0, replace(LINK, loss=1.0))
        began_at, deaths = monotonic(), training.deaths
        back = training.until_batch(lambda told: told.deaths >= deaths + workers - 1, began_at)
        return outcome(training, began_at, back.at)


# -- all ---------------------------------------------------------------------------------------------------------------

LOCAL = Work()
REMOTE = ("agent", "guardian", "remote worker")


def on_nodes(scene: Scene) -> Work:
    """Two workers of a cluster."""
    return scene.work(NODE_CPUS)


def here(work: Work) -> Callable[[Scene], Work]:
    """Workers of this machine."""
    return lambda _: work


DRILLS: tuple[Drill, ...] = (
    Drill(
        fault="a worker is killed (SIGKILL, the kernel's out-of-memory killer)",
        until="all workers run",
        make=killed(here(LOCAL), "worker"),
    ),
    Drill(
        fault='the same with `seeding="worker"`',
        until="all workers run",
        make=killed(here(Work(options={"seeding": "worker"})), "worker"),
    ),
    Drill(
        fault="the worker of a stream whose data set has a state is killed",
        until="all workers run",
        make=killed(here(Work(is_stream=True)), "worker"),
    ),
    Drill(
        fault="the process that forks workers is killed",
        until="all workers run",
        make=killed(here(LOCAL), "template"),
    ),
    Drill(
        fault="a process of several workers that are threads is killed",
        until="all workers run",
        make=killed(here(Work(is_thread_safe=True, workers=BATCH)), "worker"),
    ),
    Drill(
        fault="the training process is killed",
        until="nothing is left",
        make=training_killed(here(LOCAL), ["template", "worker"]),
    ),
    Drill(
        fault="the training process is stopped (SIGSTOP) and goes on",
        until="the next batch",
        make=stood_still(LOCAL, with_workers=False),
    ),
    Drill(
        fault="it and all of its workers are stopped (SIGSTOP, as on a laptop that sleeps) and go on",
        until="the next batch",
        make=stood_still(Work(options={"sample_timeout_s": SAMPLE_TIMEOUT_S}), with_workers=True),
    ),
    Drill(fault="a sample hangs once", until="its batch", make=hung),
    Drill(fault="a worker is killed", until="all workers run", make=killed(on_nodes, "remote worker"), needs="ray"),
    Drill(fault="an agent is killed", until="all workers run", make=killed(on_nodes, "agent"), needs="ray"),
    Drill(
        fault="a guardian (the actor) is killed",
        until="all workers run",
        make=killed(on_nodes, "guardian"),
        needs="ray",
    ),
    Drill(fault="a raylet is killed", until="all workers run", make=raylet_killed, needs="ray"),
    Drill(fault="a node is removed", until="all workers run", make=node_removed, needs="ray"),
    Drill(fault="no node is left", until="a local worker runs", make=all_nodes_killed, needs="ray"),
    Drill(
        fault="the training process of remote workers is killed",
        until="nothing is left",
        make=training_killed(on_nodes, REMOTE),
        needs="ray",
    ),
    Drill(
        fault="an agent stands still and goes on",
        until="the next batch",
        make=agent_stood_still,
        needs="network",
    ),
    Drill(
        fault="a node is cut off for some seconds",
        until="the next batch",
        make=cut_off_for_a_while,
        needs="network",
    ),
    Drill(fault="a node is cut off for good", until="the next batch", make=cut_off_for_good, needs="network"),
)
