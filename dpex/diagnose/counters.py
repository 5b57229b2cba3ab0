"""Keeps one loader's counts for its diagnosis: reads iterators when asked and when they end, never in between.

A page is an iterator. What an ended one counted is kept; its engine is let go. `Page.end` takes no lock, as a garbage
collection may call it anywhere. Beginning and ending a page read a few small files in ``/proc``.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Protocol

from dpex.core.names import INLINE, LOCAL, POOLS, REMOTE
from dpex.diagnose.facts import Facts, NodeFacts, PoolFacts, SampleFacts, SlowFacts, Subject, TransformFacts, of_all
from dpex.measure.ledger import LastReading, Ledger
from dpex.measure.sampling import SAMPLE_S, SlowBatch, as_text
from dpex.measure.sums import NodeSums, PoolSums, Sums, relative_spread
from dpex.measure.wait_causes import CAUSES
from dpex.system import run_queue
from dpex.system.clock import monotonic
from dpex.system.cpus import cgroup_cpus, local_ranks, usable_cpus
from dpex.system.machine import cpu_used
from dpex.system.run_queue import RunQueueTimes

SHORT_S = 0.2
"""Run queues of iterators that lived less are not asked about: looking would take a share of that."""


class CounterSource(Protocol):
    """What of an iterator's engine is read."""

    def sums(self) -> Sums:
        """Its counts; from any thread."""


class Page:
    """One iterator in the book, or what is left of it. Begun by the training thread, read by any."""

    def __init__(self, source: CounterSource) -> None:
        self._whole = LastReading(partial(self._measured, source))
        self._base = Sums()
        self._began_at = monotonic()
        self._cpu_s = time.process_time()
        self._thread = threading.get_native_id()
        self._queued = run_queue.look((), self._thread)
        self._used = _used(())

    def end(self) -> None:
        """Keep the counts, let go of the engine."""
        self._whole.end()

    @property
    def has_ended(self) -> bool:
        """Whether nothing will be added."""
        return self._whole.has_ended

    def read(self) -> Sums:
        """The counts since the page or the book was begun."""
        return self._whole.read().since(self._base)

    def restart(self) -> None:
        """Count from here on."""
        self._base = self._whole.read()

    def _measured(self, source: CounterSource) -> Sums:
        """Its counts, and what this process and the workers had of the CPUs; of that, what fell between two passes is
        taken off in proportion."""
        found = source.sums()
        lived_s = max(1e-6, monotonic() - self._began_at)
        part = min(1.0, found.wall_s / lived_s)
        found = replace(found, trainer_cpu_s=(time.process_time() - self._cpu_s) * part)
        return found if lived_s < SHORT_S else self._with_queues(self._with_others(found, lived_s), part)

    def _with_others(self, found: Sums, lived_s: float) -> Sums:
        """With the CPU time of other programs, if it can be told."""
        used = _used(found.pids)
        if used is None or self._used is None:
            return found
        ranks = local_ranks(os.environ)
        others_s = max(0.0, used[0] - self._used[0] - (used[1] - self._used[1]) * ranks)
        return replace(found, others_s=others_s / ranks, others_over_s=lived_s)

    def _with_queues(self, found: Sums, part: float) -> Sums:
        """With the time on run queues, of the training thread and of who makes batches."""
        queued = run_queue.look(found.pids, found.thread or self._thread)
        ran = queued.since(self._queued)
        makers = {INLINE: ran.here, LOCAL: queued.workers}
        return replace(
            found,
            trainer_queued_s=None if ran.trainer is None else ran.trainer.queued_s * part,
            pools={name: _with_queue(pool, makers.get(name)) for name, pool in found.pools.items()},
        )


def _with_queue(pool: PoolSums, ran: RunQueueTimes | None) -> PoolSums:
    """With how long its batches were on run queues, by what those who make them had to wait for a CPU."""
    return pool if ran is None else replace(pool, queued_s=pool.cpu_s * ran.delay, queue_known_s=pool.load_s)


def _used(pids: tuple[int, ...]) -> tuple[float, float] | None:
    """CPU seconds so far, of everybody on our CPUs and of this process with those; None: not to be had, or not ours."""
    if sys.platform == "linux" and cgroup_cpus() is None:
        with contextlib.suppress(OSError, ValueError, IndexError):
            return cpu_used(pids)
    return None


class LoaderCounters:
    """One loader's pages."""

    def __init__(self) -> None:
        self._pages: Ledger[Page] = Ledger(_one_after_the_other)

    def open(self, source: CounterSource) -> Page:
        """A page for this one; call `Page.end` when it has ended."""
        page = Page(source)
        self._pages.add(page)
        return page

    def read(self) -> Sums:
        """All of it now."""
        return self._pages.read()

    def restart(self) -> None:
        """Count from here on."""
        for page in self._pages.clear():
            page.restart()


def _one_after_the_other(past: Sums, page: Sums) -> Sums:
    """Levels are those of the latest page that got a batch."""
    return past.then(page) if page.batches else page.then(past)


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
        slowest=tuple(map(_slow, account.slowest)),
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


def _node(name: str, sums: NodeSums) -> NodeFacts:
    asked = sums.asked_s > 0.5 * sums.busy_s
    queued_s = sums.queued_s * sums.busy_s / sums.asked_s if asked else None
    return sums.narrowed(NodeFacts, name=name, queued_s=queued_s)


def _pool(name: str, pool: PoolSums) -> PoolFacts:
    workers = 0 if name == INLINE else pool.running
    return pool.narrowed(PoolFacts, queued_s=_queued_s(pool), workers=workers, services_s=tuple(pool.kept_s))


def _queued_s(pool: PoolSums) -> float | None:
    """Seconds on run queues, if they are known for most of what it did: from its machines where it has some."""
    busy_s = sum(node.busy_s for node in pool.nodes.values())
    if busy_s:
        queued_s, known_s = (
            sum(getattr(node, name) for node in pool.nodes.values()) for name in ("queued_s", "asked_s")
        )
    else:
        queued_s, known_s, busy_s = pool.queued_s, pool.queue_known_s, pool.load_s
    return queued_s * busy_s / known_s if known_s > 0.5 * busy_s else None


def _slow(batch: SlowBatch) -> SlowFacts:
    return SlowFacts(
        seconds=batch.seconds,
        epoch=batch.epoch,
        number=batch.number,
        indices=as_text(batch.index),
        load_s=batch.load_s,
        load_cpu_s=batch.load_cpu_s,
    )


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
