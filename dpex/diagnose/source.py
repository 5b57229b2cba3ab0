"""From the counts of a loader to the facts of its diagnosis. It needs no loader, which may have ended. Any thread."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

from dpex.autotune.types import Decision, Settings
from dpex.diagnose.facts import Facts, NodeFacts, PoolFacts, SampleFacts, Subject, TransformFacts, of_all
from dpex.engine.loader_counters import LoaderCounters
from dpex.measure.gpu_use import GpuUse
from dpex.measure.sampling import SAMPLE_S
from dpex.measure.sums import NodeStats, PoolStats, Sums, relative_spread
from dpex.measure.wait_causes import CAUSES
from dpex.schedule.names import INLINE, LOCAL, POOLS, REMOTE
from dpex.system.cpus import local_ranks, usable_cpus

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis


@dataclass(frozen=True, kw_only=True)
class Context(Subject):
    """A loader as its diagnosis sees it. note: why something is not measured, if so.

    untimed: why transforms are not.
    """

    note: str = ""
    untimed: str = ""


def facts_of(account: Sums, context: Context) -> Facts:
    """The account as a value for the rules."""
    pools = {name: _pool(name, account.pools[name]) for name in POOLS if name in account.pools}
    found = account.narrowed(
        Facts,
        **{one.name: getattr(context, one.name) for one in fields(Subject)},
        causes={name: account.causes.get(name, 0.0) for name in CAUSES},
        step_spread=relative_spread(account.step_count, account.work_s, account.stepped_squared),
        gpu_stall_s=account.gpu_running_stall_s,
        pools={name: pool for name, pool in pools.items() if pool.tickets or pool.workers},
        cpus=max(0.5, usable_cpus() / local_ranks(os.environ)),
        others=account.others_s / account.others_over_s if account.others_over_s else None,
        prefetch=account.prefetch or 1,
        deaths=sum(pool.deaths for pool in account.pools.values()),
        failed_nodes=tuple(why for pool in account.pools.values() for why in pool.failed_nodes),
        slow_samples=_slow_samples(account),
        latest_failed=tuple(account.latest_failed),
        nodes=_nodes(account, pools),
    )
    if not found.transforms:
        found = replace(found, transforms=_transforms(account, pools))
    return _with_gaps(found, context)


def _transforms(account: Sums, pools: Mapping[str, PoolFacts]) -> tuple[TransformFacts, ...] | None:
    """Steps by name, in the order in which they were first met; each pool's timed batches stand for that pool's."""
    found: dict[str, TransformFacts] = {}
    for pool, facts in pools.items():
        steps = account.pools[pool].steps
        timed = [step.narrowed(TransformFacts, name=name) for name, step in steps.items() if step.calls > 0]
        for one in of_all(timed, [facts]):
            known = found.get(one.name)
            found[one.name] = one if known is None else known.plus(one)
    return tuple(found.values()) or None


def _nodes(account: Sums, pools: Mapping[str, PoolFacts]) -> tuple[NodeFacts, ...] | None:
    """The cluster's machines, and this one where it makes batches beside them."""
    nodes = {place: node for pool in account.pools.values() for place, node in pool.nodes.items() if node.tickets > 0}
    machines = [place.partition(" (")[0] for place in nodes]
    found = [
        _node(machine if machines.count(machine) == 1 else place, node)
        for machine, (place, node) in zip(machines, nodes.items(), strict=True)
    ]
    local = pools.get(LOCAL)
    if found and local is not None and local.tickets:
        found.append(local.narrowed(NodeFacts, name="this machine"))
    return tuple(found) or None


def _node(name: str, sums: NodeStats) -> NodeFacts:
    asked = sums.asked_s > 0.5 * sums.busy_s
    queued_s = sums.queued_s * sums.busy_s / sums.asked_s if asked else None
    return sums.narrowed(NodeFacts, name=name, queued_s=queued_s)


def _pool(name: str, pool: PoolStats) -> PoolFacts:
    workers = 0 if name == INLINE else pool.running
    if name == LOCAL:  # those that start serve in a moment, and a pass may end before: a batch was all that was wanted
        workers = max(workers, pool.requested)
    return pool.narrowed(PoolFacts, queued_s=_queued_s(pool), workers=workers, services_s=tuple(pool.kept_s))


def _queued_s(pool: PoolStats) -> float | None:
    """Seconds on run queues, if they are known for most of what it did: from its machines where it has some."""
    busy_s = sum(node.busy_s for node in pool.nodes.values())
    if busy_s:
        queued_s, known_s = (
            sum(getattr(node, name) for node in pool.nodes.values()) for name in ("queued_s", "asked_s")
        )
    else:
        queued_s, known_s, busy_s = pool.queued_s, pool.queue_known_s, pool.load_s
    return queued_s * busy_s / known_s if known_s > 0.5 * busy_s else None


def _slow_samples(account: Sums) -> tuple[SampleFacts, ...]:
    tickets = sum(pool.tickets for pool in account.pools.values())
    load_s = sum(pool.load_s for pool in account.pools.values())
    made = tickets * account.samples / max(1, account.batches)
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


def _with_gaps(facts: Facts, context: Context) -> Facts:
    """Say what is missing, and why."""
    gaps = [context.note] if context.note else []
    local, remote = facts.pools.get(LOCAL), facts.pools.get(REMOTE)
    if facts.gpu_stall_s is None:
        gaps.append("GPU stall: no CUDA stream was seen; the shares are of the training loop's time")
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


class HasTuner(Protocol):
    """A tuner as it is read here. settings: the present ones. gpu_use: NVML's readings meanwhile."""

    settings: Settings
    gpu_use: GpuUse | None

    @property
    def decisions(self) -> Sequence[Decision]:
        """All so far."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisSource:
    """A loader's counts, its description, and its tuner if it has one."""

    book: LoaderCounters
    context: Context
    tuner: HasTuner | None = None

    def diagnose(self, account: Sums | None = None) -> Diagnosis:
        """Conclude from these counts, or from all in the book. Takes 50 to 100 ms of CPU."""
        from dpex.diagnose.diagnosis import diagnose

        account = account or self.book.read()
        note = "" if account.batches else self.context.note
        context = replace(self.context, note=note)
        if self.tuner is not None:
            decisions = tuple(self.tuner.decisions)
            context = replace(context, is_tuned=True, decisions=decisions, gpu_use=self.tuner.gpu_use)
        return diagnose(facts_of(account, context))
