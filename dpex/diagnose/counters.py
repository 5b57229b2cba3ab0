"""Keeps one loader's counts for its diagnosis: reads iterators when asked and when they end, never in between.

A page is an iterator. What an ended one counted is kept; its engine is let go. `Page.end` takes no lock, as a garbage
collection may call it anywhere. Beginning and ending a page read a few small files in ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import random
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from dpex.autotune.types import Decision
from dpex.diagnose.facts import LANES, Facts, LaneFacts, NodeFacts, SampleFacts, SlowFacts, TransformFacts, of_all
from dpex.measure.consumer_time import LaneSums, NodeSums, Sums
from dpex.measure.sampling import SAMPLE_S, SLOWEST, SlowBatch, SlowIndex, as_text, merged
from dpex.measure.stall_causes import CAUSES
from dpex.system import run_queue
from dpex.system.clock import monotonic
from dpex.system.cpus import cgroup_cpus, local_ranks, usable_cpus
from dpex.system.host import cpu_used
from dpex.system.run_queue import Ran

SHORT_S = 0.2
"""Run queues of iterators that lived less are not asked about: looking would take a share of that."""
SERVICES_KEPT = 1024
_TIMED = ("calls", "wall_s", "cpu_s")
_CONSUMERS = ("transfer_s", "work_s", "head_idle_s", "other_idle_s", "loop_queued_s")
_STAGES = ("load_s", "load_cpu_s", "collate_s", "collate_cpu_s", "encode_s", "encode_cpu_s", "transit_s")


class Source(Protocol):
    """What of an iterator's engine is read; one with workers also has ``look()``, see
    `dpex.engine.engine.Engine.look`."""

    def sums(self) -> Sums:
        """Its counts; from any thread."""


@dataclass(kw_only=True)
class Account:
    """Sums by name, and what cannot be added up: the state at the end, service times by lane, slow batches
    and samples."""

    sums: dict[str, float] = field(default_factory=dict)
    state: dict[str, float] = field(default_factory=dict)
    services: dict[str, list[float]] = field(default_factory=dict)
    slowest: list[SlowBatch] = field(default_factory=list)
    slow_samples: tuple[SlowIndex, ...] = ()

    def add(self, other: Account) -> None:
        """Take in what came later."""
        for name, value in other.sums.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        if other.sums.get("batches"):
            self.state = dict(other.state)
        for lane, values in other.services.items():
            known = [*self.services.get(lane, ()), *values]
            chosen = random.Random(0).sample(known, SERVICES_KEPT) if len(known) > SERVICES_KEPT else known
            self.services[lane] = chosen
        self.slowest = sorted([*self.slowest, *other.slowest], key=lambda slow: -slow.seconds)[:SLOWEST]
        self.slow_samples = merged([*self.slow_samples, *other.slow_samples])

    @property
    def batches(self) -> int:
        """Delivered."""
        return int(self.sums.get("batches", 0))

    @property
    def wall_s(self) -> float:
        """Time in passes: waiting, taking in and working."""
        spent = [value for name, value in self.sums.items() if name.startswith("cause.")]
        return sum(spent) + self.sums.get("transfer_s", 0.0) + self.sums.get("work_s", 0.0)

    @property
    def workers(self) -> tuple[float, ...]:
        """On this machine and on the cluster."""
        return tuple(self.state.get(f"{lane}.workers", 0) for lane in ("local", "remote"))

    def since(self, base: Account) -> Account:
        """Its sums less those; service times are still a choice from all, and what was slow the slowest of all."""
        sums = {name: max(0.0, value - base.sums.get(name, 0.0)) for name, value in self.sums.items()}
        return replace(self, sums=sums)


class Page:
    """One iterator in the book, or what is left of it. Begun by the training thread, read by any."""

    def __init__(self, source: Source) -> None:
        self._source: Source | None = source
        self._last: Account | None = None
        self._base = Account()
        self._began_at = monotonic()
        self._cpu_s = time.process_time()
        self._thread = threading.get_native_id()
        self._queued = run_queue.look((), self._thread)
        self._used = _used(())

    def end(self) -> None:
        """Keep the counts, let go of the engine."""
        source = self._source
        if source is not None:
            self._last = self._read(source)
            self._source = None

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be added."""
        return self._last is not None

    def read(self) -> Account:
        """The counts since the page or the book was begun."""
        source = self._source
        whole = self._last if source is None or self._last is not None else self._read(source)
        return (whole or Account()).since(self._base)

    def restart(self) -> None:
        """Count from here on."""
        self._base.add(self.read())

    def _read(self, source: Source) -> Account:
        sums = source.sums()
        look = source.look() if hasattr(source, "look") else None
        spent = sums.spent
        account = Account(slowest=list(sums.slowest), slow_samples=sums.slow_samples)
        account.sums = {f"cause.{name}": value for name, value in zip(CAUSES, spent.causes, strict=True)}
        account.sums |= {
            "passes": look.epoch + 1 if look is not None else 1,
            "batches": sums.batches,
            "samples": sums.samples,
            "transfer_s": spent.transfer_s,
            "work_s": spent.work_s,
            "steps": max(0, sums.batches - 1),
            "stepped_squared": sums.stepped_squared,
            "head_idle_s": sums.head_idle_s,
            "other_idle_s": sums.other_idle_s,
            "loop_queued_s": sums.queued_s,
        }
        account.sums |= {f"bytes.{path}": value for path, value in sums.moved_bytes.items()}
        account.state = {"depth": sums.window, "is_capped": sums.is_capped}
        for name, lane in sums.lanes.items():
            account.sums |= {f"{name}.{stage}": getattr(lane, stage) for stage in _STAGES}
            account.sums |= {f"{name}.tickets": lane.tickets, "deaths": account.sums.get("deaths", 0) + lane.deaths}
            account.state[f"{name}.workers"] = lane.running
            account.services[name] = list(lane.kept_s)
            _add_parts(account.sums, name, lane)
        if look is not None:
            account.state["batch_bytes"] = look.batch_bytes
            if look.gpu_stall_s is not None:
                account.sums["gpu_stall_s"] = look.gpu_stall_s
        wall_s = spent.wait_s + spent.transfer_s + spent.work_s
        self._add_machine(
            account, look.pids if look is not None else (), look.thread if look is not None else 0, wall_s
        )
        return account

    def _add_machine(self, account: Account, pids: tuple[int, ...], thread: int, wall_s: float) -> None:
        """What this process and the workers had of the CPUs; the time between passes is taken off in proportion."""
        lived_s = max(1e-6, monotonic() - self._began_at)
        part = min(1.0, wall_s / lived_s)
        account.sums["trainer_cpu_s"] = (time.process_time() - self._cpu_s) * part
        if lived_s < SHORT_S:
            return
        queued = run_queue.look(pids, thread or self._thread)
        ran = queued.since(self._queued)
        if ran.trainer is not None:
            account.sums["trainer_queued_s"] = ran.trainer.queued_s * part
        _add_queue(account.sums, "inline", ran.here)
        _add_queue(account.sums, "local", queued.workers)
        used = _used(pids)
        if used is not None and self._used is not None:
            others_s = max(0.0, used[0] - self._used[0] - (used[1] - self._used[1]) * local_ranks(os.environ))
            account.sums |= {"others_s": others_s / local_ranks(os.environ), "others_over_s": lived_s}


def _add_queue(sums: dict[str, float], name: str, ran: Ran | None) -> None:
    """How long a lane's batches were on run queues, by what those who make them had to wait for a CPU."""
    if ran is not None:
        cpu_s = sum(sums.get(f"{name}.{stage}_cpu_s", 0.0) for stage in ("load", "collate", "encode"))
        sums[f"{name}.queued_s"] = cpu_s * ran.delay
        sums[f"{name}.queue_known_s"] = sums.get(f"{name}.load_s", 0.0)


def _add_parts(sums: dict[str, float], name: str, lane: LaneSums) -> None:
    """Its steps and machines."""
    for step, values in lane.steps.items():
        sums |= {f"step.{name}.{field}.{step}": value for field, value in zip(_TIMED, values, strict=True)}
    for node, of_node in lane.nodes.items():
        sums |= {f"node.{field}.{node}": value for field, value in of_node._asdict().items()}
    asked_s = sum(of_node.asked_s for of_node in lane.nodes.values())
    busy_s = sum(of_node.busy_s for of_node in lane.nodes.values())
    if asked_s:
        sums[f"{name}.queued_s"] = sum(of_node.queued_s for of_node in lane.nodes.values())
        sums[f"{name}.queue_known_s"] = lane.load_s * asked_s / busy_s


def _used(pids: tuple[int, ...]) -> tuple[float, float] | None:
    """CPU seconds so far, of everybody on our CPUs and of this process with those; None: not to be had, or not ours."""
    if sys.platform == "linux" and cgroup_cpus() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return cpu_used(pids)
    return None


class Book:
    """One loader's pages."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._past = Account()
        self._pages: tuple[Page, ...] = ()

    def open(self, source: Source) -> Page:
        """A page for this one; call `Page.end` when it has ended."""
        page = Page(source)
        with self._lock:
            ended = [other for other in self._pages if other.has_ended]
            for other in ended:
                self._past.add(other.read())
            self._pages = (*(other for other in self._pages if other not in ended), page)
        return page

    def read(self) -> Account:
        """All of it now."""
        with self._lock:
            found = Account()
            found.add(self._past)
            for page in self._pages:
                found.add(page.read())
            return found

    def restart(self) -> None:
        """Count from here on."""
        with self._lock:
            self._past = Account()
            self._pages = tuple(page for page in self._pages if not page.has_ended)
            for page in self._pages:
                page.restart()


@dataclass(frozen=True, kw_only=True)
class Context:
    """What is known of a loader without measuring; see `Facts`. note: why something is not measured, if so.

    untimed: why transforms are not.
    """

    name: str = ""
    rank: int = 0
    dataset: str = ""
    batch_size: str = ""
    is_fixed: bool = False
    has_cluster: bool = False
    decisions: tuple[Decision, ...] = ()
    transforms: tuple[TransformFacts, ...] | None = None
    note: str = ""
    untimed: str = ""


def facts_of(account: Account, context: Context) -> Facts:
    """The account as a value for the rules."""
    sums, state = account.sums, account.state
    steps, work_s = sums.get("steps", 0.0), sums.get("work_s", 0.0)
    over_s = sums.get("others_over_s", 0.0)
    facts: dict[str, Any] = {name: int(sums.get(name, 0)) for name in ("passes", "batches", "samples", "deaths")}
    facts |= {name: sums.get(name, 0.0) for name in _CONSUMERS}
    facts |= {name: sums.get(name) for name in ("gpu_stall_s", "trainer_queued_s")}
    lanes = {name: _lane(name, account) for name in ("inline", "local", "remote") if f"{name}.tickets" in sums}
    found = Facts(
        **facts,
        name=context.name,
        rank=context.rank,
        dataset=context.dataset,
        batch_size=context.batch_size,
        is_fixed=context.is_fixed,
        has_cluster=context.has_cluster,
        causes={name: sums.get(f"cause.{name}", 0.0) for name in CAUSES},
        step_spread=_spread(steps, work_s, sums.get("stepped_squared", 0.0)),
        lanes={name: lane for name, lane in lanes.items() if lane.tickets or lane.workers},
        trainer_cpu_s=sums.get("trainer_cpu_s", 0.0),
        cpus=max(0.5, usable_cpus() / local_ranks(os.environ)),
        others=sums["others_s"] / over_s if over_s else None,
        batch_bytes=state.get("batch_bytes", 0.0),
        moved_bytes={name[6:]: value for name, value in sums.items() if name.startswith("bytes.")},
        depth=int(state.get("depth", 1)) or 1,
        is_capped=bool(state.get("is_capped", False)),
        slowest=tuple(map(_slow, account.slowest)),
        slow_samples=_slow_samples(account),
        transforms=context.transforms or _transforms(sums, lanes),
        nodes=_nodes(sums, lanes),
        decisions=context.decisions,
    )
    return _with_gaps(found, context)


def _transforms(sums: Mapping[str, float], lanes: Mapping[str, LaneFacts]) -> tuple[TransformFacts, ...] | None:
    """Steps by name, in the order in which they were first met; each lane's timed batches stand for that lane's."""
    found: dict[str, TransformFacts] = {}
    for lane, facts in lanes.items():
        calls = _named(sums, f"step.{lane}.calls.")
        wall_s, cpu_s = _named(sums, f"step.{lane}.wall_s."), _named(sums, f"step.{lane}.cpu_s.")
        timed = [
            TransformFacts(name=name, calls=int(calls[name]), wall_s=wall_s[name], cpu_s=cpu_s[name])
            for name in calls
            if calls[name] > 0
        ]
        for one in of_all(timed, [facts]):
            known = found.get(one.name)
            found[one.name] = one if known is None else known.plus(one)
    return tuple(found.values()) or None


def _named(sums: Mapping[str, float], prefix: str) -> dict[str, float]:
    """Those that begin so, by the rest of their names."""
    return {name[len(prefix) :]: value for name, value in sums.items() if name.startswith(prefix)}


def _nodes(sums: Mapping[str, float], lanes: Mapping[str, LaneFacts]) -> tuple[NodeFacts, ...] | None:
    """The cluster's machines, and this one where it makes batches beside them."""
    fields = {field: _named(sums, f"node.{field}.") for field in NodeSums._fields}
    places = [place for place, tickets in fields["tickets"].items() if tickets > 0]
    hosts = [place.partition(" (")[0] for place in places]
    found = [
        _node(host if hosts.count(host) == 1 else place, NodeSums._make(values[place] for values in fields.values()))
        for place, host in zip(places, hosts, strict=True)
    ]
    local = lanes.get("local")
    if found and local is not None and local.tickets:
        here = NodeFacts(
            name="this machine",
            tickets=local.tickets,
            busy_s=local.busy_s,
            cpu_s=local.cpu_s,
            queued_s=local.queued_s,
        )
        found.append(here)
    return tuple(found) or None


def _node(name: str, sums: NodeSums) -> NodeFacts:
    asked = sums.asked_s > 0.5 * sums.busy_s
    return NodeFacts(
        name=name,
        tickets=int(sums.tickets),
        busy_s=sums.busy_s,
        cpu_s=sums.cpu_s,
        queued_s=sums.queued_s * sums.busy_s / sums.asked_s if asked else None,
    )


def _lane(name: str, account: Account) -> LaneFacts:
    sums = account.sums
    load_s, known_s = sums.get(f"{name}.load_s", 0.0), sums.get(f"{name}.queue_known_s", 0.0)
    queued = sums.get(f"{name}.queued_s", 0.0) * load_s / known_s if known_s > 0.5 * load_s else None
    return LaneFacts(
        **{stage: sums.get(f"{name}.{stage}", 0.0) for stage in _STAGES},
        tickets=int(sums.get(f"{name}.tickets", 0)),
        queued_s=queued,
        workers=0 if name == "inline" else int(account.state.get(f"{name}.workers", 0)),
        services_s=tuple(account.services.get(name, ())),
    )


def _slow(batch: SlowBatch) -> SlowFacts:
    return SlowFacts(
        seconds=batch.seconds,
        epoch=batch.epoch,
        number=batch.number,
        indices=as_text(batch.index),
        load_s=batch.load_s,
        load_cpu_s=batch.load_cpu_s,
    )


def _slow_samples(account: Account) -> tuple[SampleFacts, ...]:
    sums = account.sums
    tickets, load_s = (sum(sums.get(f"{lane}.{name}", 0.0) for lane in LANES) for name in ("tickets", "load_s"))
    made = tickets * sums.get("samples", 0.0) / max(1.0, sums.get("batches", 0.0))
    if not made or not load_s:
        return ()
    mean_s = load_s / made
    return tuple(
        SampleFacts(
            index=slow.shown,
            seconds=slow.seconds,
            mean_ratio=slow.seconds / mean_s,
            times=slow.times,
            times_mean_ratio=slow.total_s / slow.times / mean_s,
        )
        for slow in account.slow_samples
    )


def _spread(steps: float, sum_s: float, squares: float) -> float | None:
    if steps < 4 or sum_s <= 0:
        return None
    return float(max(0.0, squares * steps / sum_s**2 - 1.0) ** 0.5)


def _with_gaps(facts: Facts, context: Context) -> Facts:
    """Say what is missing, and why."""
    gaps = [context.note] if context.note else []
    local, remote = facts.lanes.get("local"), facts.lanes.get("remote")
    if facts.gpu_stall_s is None:
        gaps.append("GPU stall: no CUDA stream was seen; the shares are of the host's time")
    if local is not None and local.tickets and local.queued_s is None:
        gaps.append("waiting for a CPU on this machine: the kernel does not tell, or workers lived too briefly")
    if remote is not None and remote.tickets and remote.queued_s is None:
        gaps.append("waiting for a CPU on other machines: their kernels do not tell")
    if facts.others is None:
        gaps.append("CPU time of other programs: a quota holds here, or the system does not tell")
    if not any(one.is_within for one in facts.transforms or ()):
        gaps.append(f"single transforms: {context.untimed or _why_no_transforms(facts)}")
    if facts.tickets and not facts.slow_samples:
        none = f"not where they take under {1e6 * SAMPLE_S:.0f} µs, in streams, with __getitems__ or batch_size=None"
        gaps.append(f"slowest samples: none was timed alone ({none})")
    return replace(facts, unmeasured=tuple(gaps))


def _why_no_transforms(facts: Facts) -> str:
    if facts.transforms:
        seen = "an attribute that can be called and is named for a transform, or holds a list of transforms"
        return f"the dataset has none that can be seen ({seen}); what its own methods take is together"
    return "no batch was timed yet; from the second of a worker on one is now and then"
