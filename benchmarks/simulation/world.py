"""What a simulated world consists of: work, steps, machine, cluster, and the phases in which they change.

Everything hostile is off by default; each says where it is met.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shards:
    """Runs of slow batches among fast ones: shards of larger images, cold objects, a busy storage server.

    share: of the batches that are slow. factor: by how much longer they take. batches: how many in a row, on average.
    """

    share: float
    factor: float
    batches: float


@dataclass(frozen=True, kw_only=True)
class Cache:
    """The page cache warms up: waiting falls as more of the data set has been read.

    batches: in the data set. warm: part of the waiting that is left once all is cached. is_gradual: it falls with each
    batch of the first pass (samples share pages, as in archives read at random), not only from the second pass on.
    """

    batches: int
    warm: float
    is_gradual: bool = False


@dataclass(frozen=True, kw_only=True)
class Work:
    """Making one batch: waiting (storage, network) and CPU, in seconds.

    spread: sigma of a log-normal factor with mean 1 on both. correlation: how many batches that factor's memory is
    long (AR(1) in its logarithm, falling to 1/e), as samples that lie together are alike; 0: none. rare, rare_factor: a
    share of batches takes that much longer. read: bytes, or requests, of the storage that all readers share.
    encode_s: CPU for handing it over, in a worker only. recorded: waiting and CPU of batches in turn, from a real run;
    then begins again.
    """

    cpu_s: float = 0.0
    wait_s: float = 0.0
    spread: float = 0.0
    correlation: float = 0.0
    rare: float = 0.0
    rare_factor: float = 1.0
    shards: Shards | None = None
    cache: Cache | None = None
    read: float = 0.0
    encode_s: float = 0.0
    batch_bytes: float = 1e6
    recorded: tuple[tuple[float, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the consumer does with a batch: time on its GPU, CPU on the machine, both in seconds; spread as in `Work`.

    recorded: GPU time of steps in turn, from a real run; then begins again.
    """

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    spread: float = 0.0
    recorded: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Storage:
    """A disk or a server that all readers share. capacity: bytes, or requests, a second. reader: at most so many each.

    loss: by which part the whole gets slower with each further reader, as disks do that have to seek.
    """

    capacity: float
    reader: float = 1e15
    loss: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From ``at`` seconds on this holds; what is None stays as it was.

    others: CPUs that other people's programs want on the trainer's machine. nodes: remote workers the cluster has room
    for (those beyond it die). link: bytes per second from the cluster. stream: random numbers begin anew with this
    number, so that they do not depend on how many batches were made before. cpus: CPUs that the job is granted, where a
    quota changes.
    """

    at: float = 0.0
    work: Work | None = None
    step: Step | None = None
    others: float | None = None
    nodes: int | None = None
    link: float | None = None
    storage: Storage | None = None
    stream: int | None = None
    cpus: float | None = None


@dataclass(frozen=True, kw_only=True)
class Bursts:
    """Other people's programs that come and go: so many CPUs, for ``on_s`` on average, then none for ``off_s``.

    Times are exponential, or with ``is_regular`` always the same: programs that may keep time with the trials of a
    controller.
    """

    cpus: float
    on_s: float
    off_s: float
    is_regular: bool = False


@dataclass(frozen=True, kw_only=True)
class SlowSpells:
    """Workers that are slow for a while: a core that is throttled, a node with a noisy neighbour.

    share: of the time. factor: on all that a batch begun then takes. seconds: of a spell, on average. remote: workers
    of the cluster, else local ones. together: how many workers have it at the same time, as they are on one node.
    """

    share: float
    factor: float
    seconds: float
    remote: bool = False
    together: int = 1


@dataclass(frozen=True, kw_only=True)
class Pauses:
    """Validation, a checkpoint, garbage collection: every so often the trainer does something else between two steps.

    With ``stops_all`` every process stops, workers and sampling included: SIGSTOP, a suspended machine.
    """

    every_s: float
    seconds: float
    stops_all: bool = False


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU that works off what the training process launches, while that goes on. Without one, a step's ``gpu_s``
    holds up the training process, as where each step reads its loss.

    queue: steps that may be launched and not done; a further launch waits, as in a driver whose queue is full.
    sync_every: the training process waits for the GPU after so many steps, 0: never. compile_s: CPU of the training
    process before its first step. warm_up, warm_up_factor: so many steps at first take the GPU that much longer (it
    tries algorithms). all_reduce_s: of GPU time at the end of a step, from when all ranks have come to it; who waits
    for the others runs a kernel meanwhile. evaluation: now and then the training process waits while the GPU is busy
    with something else; in `World.pauses` it is not (a checkpoint). has_events, has_nvml: whether CUDA events can be
    had on the stream, and NVML.
    """

    queue: int = 4
    sync_every: int = 0
    compile_s: float = 0.0
    warm_up: int = 0
    warm_up_factor: float = 1.0
    all_reduce_s: float = 0.0
    evaluation: Pauses | None = None
    has_events: bool = True
    has_nvml: bool = True


@dataclass(frozen=True, kw_only=True)
class Epochs:
    """Passes over a small dataset. batches: of a pass. is_kept: workers live on from one pass to the next.

    between_s: what the training process does between two passes.
    """

    batches: int
    is_kept: bool = False
    between_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class World:
    """What stays the same.

    own_s: CPU of the consumer per batch from a worker. fork_s, actor_s: until a worker is up. start_cpu_s: CPU that the
    start of a local worker takes after that.
    thrash: by how much more CPU a batch costs per process beyond the number of CPUs (caches, memory bandwidth).
    smt_yield: CPUs are hyper-threads, two to a core; the second of a core adds this part of a core's speed (0.2 to 0.3
    is usual). None: CPUs are cores. worker_bytes: memory of a local worker. noise: relative error of every measured
    time. tick_s: CPU clocks count in these steps (10 ms where the kernel counts ticks), 0: exactly. knows_queue: if
    the system tells who waited for a CPU (as Linux does, and others do not).
    """

    cpus: float = 2.0
    ranks: int = 1
    own_s: float = 0.0003
    fork_s: float = 0.02
    actor_s: float = 1.5
    start_cpu_s: float = 0.0
    rtt_s: float = 0.001
    thrash: float = 0.0
    smt_yield: float | None = None
    worker_bytes: float = 5e7
    memory: float = 8e9
    noise: float = 0.0
    tick_s: float = 0.0
    knows_queue: bool = True
    bursts: Bursts | None = None
    slow: SlowSpells | None = None
    pauses: Pauses | None = None
    gpu: Gpu | None = None
    epochs: Epochs | None = None
    seed: int = 0
    phases: tuple[Phase, ...] = ()
