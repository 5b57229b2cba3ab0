"""What a simulated world consists of: work, steps, machine, cluster, and the phases in which they change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Work:
    """Making one batch: waiting (storage, network) and CPU, in seconds.

    spread: sigma of a log-normal factor with mean 1 on both. rare, rare_factor: a share of batches takes that much
    longer. encode_s: CPU for handing it over, in a worker only.
    """

    cpu_s: float = 0.0
    wait_s: float = 0.0
    spread: float = 0.0
    rare: float = 0.0
    rare_factor: float = 1.0
    encode_s: float = 0.0
    batch_bytes: float = 1e6


@dataclass(frozen=True, kw_only=True)
class Step:
    """What the consumer does with a batch: time on its GPU, CPU on the host, both in seconds; spread as in `Work`."""

    gpu_s: float = 0.0
    cpu_s: float = 0.0
    spread: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Phase:
    """From ``at`` seconds on this holds; what is None stays as it was.

    others: CPUs that other people's programs want on the trainer's machine. nodes: remote workers the cluster has room
    for (those beyond it die). link: bytes per second from the cluster.
    """

    at: float = 0.0
    work: Work | None = None
    step: Step | None = None
    others: float | None = None
    nodes: int | None = None
    link: float | None = None


@dataclass(frozen=True, kw_only=True)
class World:
    """What stays the same in a simulation.

    own_s: CPU of the consumer per batch from a worker. fork_s, actor_s: until a worker is up.
    thrash: by how much more CPU a batch costs per process beyond the number of CPUs (caches, memory bandwidth).
    worker_bytes: memory of a local worker. noise: relative error of every measured time.
    """

    cpus: float = 2.0
    ranks: int = 1
    own_s: float = 0.0003
    fork_s: float = 0.02
    actor_s: float = 1.5
    rtt_s: float = 0.001
    thrash: float = 0.0
    worker_bytes: float = 5e7
    memory: float = 8e9
    noise: float = 0.0
    seed: int = 0
    phases: tuple[Phase, ...] = ()
