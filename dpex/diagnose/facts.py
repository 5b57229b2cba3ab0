"""What was measured of a loader, as one value. Everything that is concluded is concluded from this alone. Pure.

Seconds are sums over all passes since the loader was made or `diagnose(reset=True)` was last called; the time between
passes is in none of them. ``Facts.slowest`` and ``Facts.slow_samples`` are about all passes. None: not measured, and
`Facts.unmeasured` says why.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from dpex.autotune.types import Decision

LANES = ("inline", "local", "remote")
WITHIN = " > "
COLLATE = "collate"


@dataclass(frozen=True, kw_only=True)
class LaneFacts:
    """What one lane did. load_s: wall time in ``dataset[i]``; collate_s: in the collate function; encode_s: writing
    batches into slots; ``*_cpu_s``: CPU time in these. transit_s: on the way from a remote worker. queued_s: workers
    could have run and had no CPU. workers: running at the end. services_s: wall times of single batches, a fair choice.
    """

    tickets: int = 0
    load_s: float = 0.0
    load_cpu_s: float = 0.0
    collate_s: float = 0.0
    collate_cpu_s: float = 0.0
    encode_s: float = 0.0
    encode_cpu_s: float = 0.0
    transit_s: float = 0.0
    queued_s: float | None = None
    workers: int = 0
    services_s: tuple[float, ...] = ()

    @property
    def busy_s(self) -> float:
        """Wall time of all stages."""
        return self.load_s + self.collate_s + self.encode_s

    @property
    def cpu_s(self) -> float:
        """CPU time of all stages."""
        return self.load_cpu_s + self.collate_cpu_s + self.encode_cpu_s


@dataclass(frozen=True, kw_only=True)
class SlowFacts:
    """A batch that took ``seconds`` to make: its epoch and number, the dataset indices it is made of, as text."""

    seconds: float
    epoch: int
    number: int
    indices: str
    load_s: float = 0.0
    load_cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class SampleFacts:
    """A dataset index, as text, of which a sample took long: seconds at the worst, and how many times the mean sample's
    that is; how often it was so slow that it was kept, and how many times the mean sample's it took on average then."""

    index: str
    seconds: float
    mean_ratio: float
    times: int = 1
    times_mean_ratio: float = 0.0


@dataclass(frozen=True, kw_only=True)
class TransformFacts:
    """A transform, or what else the dataset or the collate function does: calls timed, wall and CPU seconds in them
    without the steps within ("a > b" is step b within a), and those of all batches by the same shares."""

    name: str
    calls: int
    wall_s: float
    cpu_s: float
    all_wall_s: float = 0.0
    all_cpu_s: float = 0.0

    def plus(self, other: TransformFacts) -> TransformFacts:
        """The same step elsewhere, together with this one."""
        return TransformFacts(
            name=self.name,
            calls=self.calls + other.calls,
            wall_s=self.wall_s + other.wall_s,
            cpu_s=self.cpu_s + other.cpu_s,
            all_wall_s=self.all_wall_s + other.all_wall_s,
            all_cpu_s=self.all_cpu_s + other.all_cpu_s,
        )

    @property
    def short(self) -> str:
        """Its name without those of the steps it is in."""
        return self.name.rpartition(WITHIN)[2]

    @property
    def is_within(self) -> bool:
        """Whether it is a step of the dataset's or the collate function's, and not one of these itself."""
        return WITHIN in self.name

    @property
    def is_collating(self) -> bool:
        """Whether it is the collate function or a step of it."""
        return self.name.partition(WITHIN)[0] == COLLATE


def of_all(timed: Iterable[TransformFacts], lanes: Iterable[LaneFacts]) -> tuple[TransformFacts, ...]:
    """What was timed of some batches, taken to be as it was for all: stages are parted by it, CPU time by CPU time."""
    timed, lanes = tuple(timed), tuple(lanes)
    found = []
    for one in timed:
        stage = [other for other in timed if other.is_collating == one.is_collating]
        name = "collate" if one.is_collating else "load"
        wall_s = sum(getattr(lane, f"{name}_s") for lane in lanes)
        cpu_s = sum(getattr(lane, f"{name}_cpu_s") for lane in lanes)
        all_wall_s = wall_s * one.wall_s / max(1e-12, sum(other.wall_s for other in stage))
        all_cpu_s = cpu_s * one.cpu_s / max(1e-12, sum(other.cpu_s for other in stage))
        found.append(replace(one, all_wall_s=all_wall_s, all_cpu_s=min(all_wall_s, all_cpu_s)))
    return tuple(found)


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One machine: batches made there, wall and CPU seconds for them, and seconds that workers could have run and had
    no CPU."""

    name: str
    tickets: int
    busy_s: float
    cpu_s: float
    queued_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """See the module.

    causes: the consumer's waiting by cause (see `dpex.measure.stall_causes`). transfer_s: it took batches in. work_s:
    it worked. step_spread: standard deviation of steps over their mean. head_idle_s, other_idle_s: waits times the part
    of the workers without anything to do, the first where later batches were ready. loop_queued_s: seconds inside
    ``next()`` in which the training thread could have run and had no CPU, as far as they were asked for. gpu_stall_s:
    the GPU's stream waited for data. trainer_cpu_s, trainer_queued_s: CPU time of this process in passes, and its
    training thread on the run queue. cpus: that may be used here; others: of these, busy with other programs.
    batch_bytes: mean size, 0 if unknown. moved_bytes: by path. depth: batches in flight at most; is_capped:
    ``memory_budget`` keeps it smaller than it would be. is_fixed: batches belong to workers (``seeding="worker"``).
    decisions: the tuner's, with what they were to bring and what they brought.
    """

    name: str = ""
    rank: int = 0
    dataset: str = ""
    batch_size: str = ""
    is_fixed: bool = False
    has_cluster: bool = False
    passes: int = 0
    batches: int = 0
    samples: int = 0
    causes: Mapping[str, float] = field(default_factory=dict)
    transfer_s: float = 0.0
    work_s: float = 0.0
    step_spread: float | None = None
    head_idle_s: float = 0.0
    other_idle_s: float = 0.0
    loop_queued_s: float = 0.0
    gpu_stall_s: float | None = None
    lanes: Mapping[str, LaneFacts] = field(default_factory=dict)
    trainer_cpu_s: float = 0.0
    trainer_queued_s: float | None = None
    cpus: float = 1.0
    others: float | None = None
    batch_bytes: float = 0.0
    moved_bytes: Mapping[str, float] = field(default_factory=dict)
    depth: int = 1
    is_capped: bool = False
    deaths: int = 0
    slowest: tuple[SlowFacts, ...] = ()
    slow_samples: tuple[SampleFacts, ...] = ()
    transforms: tuple[TransformFacts, ...] | None = None
    nodes: tuple[NodeFacts, ...] | None = None
    decisions: tuple[Decision, ...] = ()
    unmeasured: tuple[str, ...] = ()

    @property
    def wait_s(self) -> float:
        """All waiting, the start of each pass included."""
        return sum(self.causes.values())

    @property
    def wall_s(self) -> float:
        """All passes."""
        return self.wait_s + self.transfer_s + self.work_s

    @property
    def lost_ratio(self) -> float:
        """Share of wall time in which the training loop waited for batches or took them in, 0 to 1."""
        return (self.wait_s + self.transfer_s) / self.wall_s if self.wall_s > 0 else 0.0

    @property
    def stall_ratio(self) -> float:
        """The same without the start of each pass: what the tuner and the predictions call stall."""
        running_s = self.wall_s - self.causes.get("startup", 0.0)
        return (running_s - self.work_s) / running_s if running_s > 0 else 0.0

    @property
    def gpu_lost_ratio(self) -> float | None:
        """Share of wall time in which the GPU's stream waited for data, None if unknown."""
        return None if self.gpu_stall_s is None or self.wall_s <= 0 else self.gpu_stall_s / self.wall_s

    @property
    def local(self) -> int:
        """Workers on this machine."""
        return self.lanes["local"].workers if "local" in self.lanes else 0

    @property
    def remote(self) -> int:
        """Workers on the cluster."""
        return self.lanes["remote"].workers if "remote" in self.lanes else 0

    @property
    def workers(self) -> int:
        """Of both lanes."""
        return self.local + self.remote

    @property
    def tickets(self) -> int:
        """Batches made, wherever."""
        return sum(lane.tickets for lane in self.lanes.values())

    @property
    def busy_s(self) -> float:
        """Wall time that making them took."""
        return sum(lane.busy_s for lane in self.lanes.values())
