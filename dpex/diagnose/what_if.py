"""Predictions for other settings and cheaper work, by the law's model. Pure.

A run takes ``start + order + batches / rate`` seconds: its starts, the waits due to the order of batches, and its
batches at the model's rate. Predictions add the error of this formula at the present setting. A change outside the
model saves the seconds of its cause (`dpex.measure.causes`). A batch takes a step and a wait, so in each prediction
``rate * step_s + wait`` is 1. Changes that need no new code (`AT_HAND`) come first, and each group is sorted by rate.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from dpex.autotune.constants import CONSTANTS, MOST_WORKERS
from dpex.autotune.law.model import Model, PoolCost
from dpex.diagnose import work
from dpex.diagnose.caching import cachable
from dpex.diagnose.end_of_stall import MATTERS, stage_name
from dpex.diagnose.facts import Facts
from dpex.diagnose.hot_calls import hot_calls, is_blocking, of_cause
from dpex.diagnose.verdict import TRANSFORM, waited_for
from dpex.measure.causes import NARROW, TAKING_IN, WAITS, LostTime
from dpex.measure.readable import plural
from dpex.measure.settings import Settings
from dpex.measure.views import cpus_used, is_full
from dpex.schedule.names import lanes

WORTH = 0.03
"""Minimum relative gain of the rate of a recommended change, because runs of one setting differ by as much."""
HALF = 0.5
"""Factor of a cost when the work is halved."""
_THREADS = 32
"""Maximum threads of `asyncio.to_thread`. Below this limit it has four more threads than CPUs."""
_ELSEWHERE = 1000
"""Maximum workers on other machines that a prediction adds."""

ARGUMENTS = ("workers", "inline", "prefetch", "budget", "start", "streams")
"""Changes of an argument of the loader."""
AT_HAND = (*ARGUMENTS, "free")
"""Changes that need no new code: other arguments, and stopping other programs. They are advised first."""
_MOST_READING = 0.95
"""The wait for readers counts as at most this share of the time when the number of streams is calculated."""
CACHED = 0.95
"""Share of the cost of a sample that is saved if the sample is in a cache."""
INLINE_S = 5e-6
"""Seconds that ``next()`` takes without workers, in addition to making the batch."""
DISPATCH_S = 1e-4
"""Seconds of the training loop to dispatch and receive a batch. It is assumed for a run that has had no workers yet."""
TUNERS = ("workers", "prefetch")
"""Changes that the tuner makes by itself."""


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """A change and its effect on the run.

    Attributes:
        change: The change in words.
        kind: The kind of change: a key of `EFFORT`.
        settings: Workers and prefetch after the change.
        rate: Batches per second, within ``rate_low`` to ``rate_high``.
        step_s: Mean seconds of a training step after the change: ``rate * step_s + wait`` is 1.
        wait: Share of the training loop's time in ``next()``, 0 to 1, within ``low`` to ``high``.
        condition: An assumption of the prediction, or "".
    """

    change: str
    kind: str
    settings: Settings
    rate: float
    step_s: float
    wait: float
    low: float
    high: float
    rate_low: float
    rate_high: float
    condition: str = ""


def better(facts: Facts, found: LostTime, model: Model, after: Prediction | None = None) -> tuple[Prediction, ...]:
    """Return the changes that make more batches per second: first changes `AT_HAND`, then others, by falling rate.

    ``after``: A change of arguments. Return the changes of code that add to it; none after ``num_workers=0``, because a
    batch costs less in the training process than in the workers, where it was measured.
    """
    if after is not None and model.now.workers and not after.settings.workers:
        return ()
    run = Run(facts=facts, found=found, model=model, base=None if after is None else after.settings)
    least = (1.0 + WORTH) * (facts.rate if after is None else after.rate)
    changes = [one for one in run.changes() if one.rate > least and (after is None or one.kind not in AT_HAND)]
    return tuple(sorted(changes, key=lambda one: (one.kind not in AT_HAND, -one.rate)))


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run as the model sees it. ``base``: The settings under which changes are predicted; None: the present ones."""

    facts: Facts
    found: LostTime
    model: Model
    base: Settings | None = None

    # -- how long the same batches would take --------------------------------------------------------------------------

    def predicted(
        self,
        kind: str,
        change: str,
        settings: Settings | None = None,
        *,
        model: Model | None = None,
        saved_s: float = 0.0,
        held_s: float | None = None,
        shorter_s: float = 0.0,
        condition: str = "",
    ) -> Prediction:
        """Predict the effect of other settings, other work (``model``), saved wall time (``saved_s``), another time in
        which steps wait for a CPU (``held_s``), or shorter steps (``shorter_s``)."""
        facts, now = self.facts, self.model.now
        model, settings = model or self.model, settings or self.base or now
        held_s = facts.held_s if held_s is None else held_s
        off_s = self._model_error_s if bool(now.workers) == bool(settings.workers) else 0.0
        step_s = max(0.0, facts.work_s - facts.held_s - shorter_s) + held_s
        floor_s = self._seconds(model, settings, held_s, is_free=True) if settings.workers else 0.0
        floor_s = max(1e-9, floor_s, step_s)
        wall_s = max(floor_s, self._seconds(model, settings, held_s) + off_s - saved_s)
        rates = model.rate(settings if settings.workers else now)
        error = rates.value / rates.low - 1.0
        fastest_s, slowest_s = max(floor_s, wall_s / (1.0 + error)), wall_s * (1.0 + error)
        return Prediction(
            change=change,
            kind=kind,
            settings=settings,
            rate=facts.batches / wall_s,
            step_s=step_s / facts.batches,
            wait=1.0 - step_s / wall_s,
            low=1.0 - step_s / fastest_s,
            high=1.0 - step_s / slowest_s,
            rate_low=facts.batches / slowest_s,
            rate_high=facts.batches / fastest_s,
            condition=condition,
        )

    @property
    def _model_error_s(self) -> float:
        """Measured wall seconds minus predicted wall seconds, at the present setting."""
        return self.facts.wall_s - self._seconds(self.model, self.model.now, self.facts.held_s)

    def _seconds(self, model: Model, settings: Settings, held_s: float, *, is_free: bool = False) -> float:
        """Return the wall seconds of all batches. ``is_free``: as if batches took no time, so only the steps count."""
        count = self.facts.later_batches
        step_s = (
            model.step_s + held_s / count + (DISPATCH_S if settings.workers and not self.model.now.workers else 0.0)
        )
        if is_free or not settings.workers:
            return count * (step_s if is_free else (self.facts.work_s / count + model.local.service_s))
        start, start_s = model.start, self.facts.causes.get("startup", 0.0)
        if start is not None:
            local = max(1, settings.local)
            start_s = self.facts.passes * start.seconds_with(local, model.free_cpus(local))
        return start_s + self._order_s(model, settings) + count * max(step_s, 1.0 / model.rate(settings).value)

    def _order_s(self, model: Model, settings: Settings) -> float:
        """Return the seconds lost to the order of batches: the measured seconds, reduced if the prefetch is larger."""
        now, enough = model.now.prefetch, work.covering_prefetch(self.facts, model)
        left = (enough - settings.prefetch) / (enough - now) if enough > now else now / max(1, settings.prefetch)
        return self.found.flagged_s("is_order") * min(1.0, max(0.0, left))

    # -- changes -------------------------------------------------------------------------------------------------------

    def changes(self) -> Iterator[Prediction]:
        """Yield all candidate changes with their predictions."""
        if not self.facts.keeps_workers:
            yield from self._settings()
            yield from self._without_workers()
            yield from self._elsewhere()
        yield from self._streams()
        yield from self._starts()
        yield from self._cpus()
        yield from self._cheaper()
        yield from self._in_next()
        yield from self._on_device()

    def _settings(self) -> Iterator[Prediction]:
        """Yield the settings that the law would choose, and a change of the prefetch alone."""
        facts, model, now = self.facts, self.model, self.model.now
        depth = max(CONSTANTS.depth, min(CONSTANTS.depth_by_slowest * model.unevenness, CONSTANTS.most_depth))
        is_late = self.found.flagged_s("is_order") > MATTERS * facts.wall_s
        local, remote = model.best(facts.config.headroom)
        if local + remote < now.workers and model.start is None:
            local, remote = now.local, now.remote  # fewer workers are as fast, but no faster
        each = max(2, math.ceil(now.prefetch / now.workers)) if now.workers and not is_late else int(depth)
        prefetch = now.prefetch if facts.is_capped else max(each * (local + remote), 1)
        chosen = Settings(local=local, remote=remote, prefetch=prefetch)
        if (local, remote) != (now.local, now.remote):
            is_more = model.cpu_share < HALF and chosen.workers > now.workers
            condition = "the storage serves more readers as fast" if is_more else ""
            change = _arguments(now, chosen) + self._kept_workers_text(local)
            yield self.predicted("workers", change, chosen, condition=condition)
        if is_late and now.workers:
            wanted = replace(now, prefetch=max(now.prefetch, math.ceil(depth) * facts.at_once))
            text = f"prefetch_factor={math.ceil(wanted.prefetch / now.workers)}, {wanted.prefetch} batches in flight"
            if facts.is_capped:
                text = f"a memory_budget for {wanted.prefetch} batches in flight instead of {now.prefetch}"
            yield self.predicted("budget" if facts.is_capped else "prefetch", text, wanted)

    def _without_workers(self) -> Iterator[Prediction]:
        """Yield a run that makes its batches in the training process, at ``1 / (service + step)`` batches per second.

        The service time leaves out dispatch and encoding.
        This rate is the lower end of the range, because a batch takes longer in a worker, which shares CPU caches with
        other processes. The upper end is the rate of batches that take no time to make. Nothing is yielded for
        coroutines, streams of a dataset, other nodes and page-locked memory, which the formula leaves out.
        """
        facts, now, pool = self.facts, self.model.now, self.facts.local
        travels = now.remote or facts.causes.get("transit") or facts.causes.get("h2d")
        if not now.local or not pool.tickets or travels or facts.streams or facts.is_asynchronous:
            return
        model = self._scaled(1.0 - _part(pool.encode_s, pool.busy_s), 1.0 - _part(pool.encode_cpu_s, pool.cpu_s))
        firsts = facts.batches - facts.later_batches
        more_s = facts.causes.get("sampler", 0.0) + facts.batches * INLINE_S + firsts * model.local.service_s
        change, settings = f"num_workers=0 instead of {plural(now.local, 'worker')}", Settings(local=0, prefetch=1)
        found = self.predicted("inline", change, settings, model=model, saved_s=-more_s)
        free = self._scaled(0.0, 0.0)
        most = self.predicted("inline", change, settings, model=free, saved_s=-facts.batches * INLINE_S)
        yield replace(found, low=most.wait, rate_high=most.rate)

    def _streams(self) -> Iterator[Prediction]:
        """Yield enough streams of an iterable dataset to end the stall, at most one for each shard."""
        facts, now = self.facts, self.model.now
        count = min(self._wanted_streams(), facts.shards or MOST_WORKERS)
        if not facts.streams or count <= facts.streams:
            return
        argument = f"AutotuneConfig(max_streams={count})" if facts.is_auto and facts.shards else f"num_workers={count}"
        change = f"{argument}, which reads {count} streams instead of {facts.streams}"
        is_waiting = (facts.read_cpu_s / facts.read_s if facts.read_s else self.model.cpu_share) < HALF
        conditions = [
            *([] if facts.shards else ["the dataset divides itself among its workers"]),
            *(["the storage serves more readers as fast"] if is_waiting else []),
        ]
        more, saved_s = count / facts.streams, 0.0
        local, remote = (0, count) if now.remote else (count, 0)
        settings = replace(now, local=local, remote=remote, prefetch=int(more * now.prefetch))
        if not facts.keeps_workers:  # only readers are added; the workers that decode wait less for them
            settings, saved_s = now, min(work.stream_s(facts), (1.0 - 1.0 / more) * facts.running_s)
        condition = " and ".join(conditions)
        yield self.predicted("streams", change, settings, saved_s=saved_s, condition=condition)

    def _wanted_streams(self) -> int:
        """Return the number of streams that ends the stall; at most one per CPU if reading mostly computes."""
        facts = self.facts
        if facts.keeps_workers:
            return sum(replace(self.model, start=None).best(facts.config.headroom))
        left = 1.0 - min(_MOST_READING, work.stream_s(facts) / max(1e-9, facts.running_s))
        wanted = math.ceil(facts.config.headroom * facts.streams / left)
        is_computing = _part(facts.read_cpu_s, facts.read_s) >= HALF
        return min(wanted, math.ceil(facts.cpus)) if is_computing else wanted

    def _kept_workers_text(self, local: int) -> str:
        """Return a text with the best number of workers that are kept between epochs; "" if at most ``local``."""
        kept = replace(self.model, start=None).best(self.facts.config.headroom)[0]
        if kept <= local:
            return ""
        return f" ({kept} with persistent_workers=True: without it, each epoch starts them anew)"

    def _elsewhere(self) -> Iterator[Prediction]:
        """Yield enough workers on other machines to end the stall."""
        model, now, missing = self.model, self.model.now, self.model.to_end_stall().more_cpus
        if not missing or (self.facts.is_tuned and self.facts.has_cluster):
            return
        local = max(1, now.local, model.best(self.facts.config.headroom)[0])
        more = math.ceil(missing / max(1e-9, model.cpu_share))
        remote = now.remote + min(_ELSEWHERE, more)
        settings = Settings(local=local, remote=remote, prefetch=2 * (local + remote))
        change = f"{remote} worker{'s' * (remote > 1)} on other nodes beside {local} here"
        kind = "place" if self.facts.has_cluster else "machines"
        yield self.predicted(kind, change, settings, condition="their CPUs are as fast")

    def _starts(self) -> Iterator[Prediction]:
        """Yield workers that are kept between passes, so that each later pass starts in the time of one batch."""
        facts = self.facts
        startup_s, passes = facts.causes.get("startup", 0.0), max(1, facts.passes)
        if startup_s < MATTERS * facts.wall_s:
            return
        first_s = startup_s / passes
        if not facts.starts_anew or not facts.workers:
            yield self.predicted("cheaper", "a start in half the time", saved_s=HALF * startup_s)
            return
        saved_s = max(0.0, first_s - self.model.local.service_s) * (passes - 1 if passes > 1 else 1)
        condition = "" if passes > 1 else "there are more epochs"
        yield self.predicted("start", "persistent_workers=True", saved_s=saved_s, condition=condition)

    def _cpus(self) -> Iterator[Prediction]:
        """Yield fewer workers, which leave CPUs to the training loop, and a machine without other programs."""
        facts, now, used = self.facts, self.model.now, cpus_used(self.facts)
        own, others = used["the workers"], used["other programs"]
        held_s, crowding_s = facts.held_s, self.found.by_cause["crowding"]
        part = own / max(1e-9, own + others)  # the workers' share in the lack of CPUs
        if now.local > 1 and not facts.keeps_workers:
            fewer = replace(now, local=max(1, min(now.local - 1, int(facts.cpus - 1))))
            gone = part * (1.0 - fewer.local / now.local)
            text = f"num_workers={fewer.workers} instead of {now.workers}"
            yield self.predicted("workers", text, fewer, held_s=held_s * (1.0 - gone), saved_s=crowding_s * gone)
        if others >= MATTERS * facts.cpus:
            yield self._without_others(others, held_s * part, crowding_s * (1.0 - part))

    def _without_others(self, others: float, held_s: float, saved_s: float) -> Prediction:
        """Predict a machine without other programs.

        If the workers lack CPUs, the time that the model does not explain is charged to the other programs, but not the
        waits for a stream's readers. The result is a range, because run queues show only a part of the time that other
        programs take. One end keeps the model's present error. At the other, steps and batches take only CPU time.
        """
        facts, model = self.facts, self.model
        text = f"without the other programs, which use {others:.2g} CPUs"
        waits_s = work.stream_s(facts) * (1.0 - _part(facts.read_cpu_s, facts.read_s))
        most_s = saved_s + (max(0.0, self._model_error_s - waits_s) if model.lacks_cpus else 0.0)
        likely = self.predicted("free", text, model=model.without_others(), held_s=held_s, saved_s=most_s)
        kept = model.without_others(keeps_factor=True)
        same = self.predicted("free", text, model=kept, held_s=held_s, saved_s=saved_s)
        bounds = [likely, same]
        if is_full(facts) and facts.gpu_running_stall_s is None:
            quick, step_s = model.without_others(only_cpu=True), facts.work_s - facts.held_s
            shorter_s = max(0.0, step_s - facts.trainer_cpu_s)
            bounds.append(self.predicted("free", text, model=quick, held_s=0.0, shorter_s=shorter_s, saved_s=most_s))
        return replace(
            likely,
            low=min(one.low for one in bounds),
            high=max(one.high for one in bounds),
            rate_low=min(likely.rate, max(facts.rate, min(one.rate_low for one in bounds))),
            rate_high=max(one.rate_high for one in bounds),
        )

    def _cheaper(self) -> Iterator[Prediction]:
        """Yield the costliest call or stage at half its cost, and ways to avoid waits for samples."""
        facts, stage = self.facts, work.costliest(self.facts)
        hot = next(iter(hot_calls(facts)), None)
        if hot is not None:
            what = f"waits for {hot.waits_for}, at half its wait" if hot.waits_for else "computes, at half its cost"
            cpu = 1.0 if hot.waits_for else 1.0 - HALF * _part(hot.cpu_s, facts.cpu_s)
            yield self._costing("cheaper", f"{hot.title}, which {what}", 1.0 - HALF * hot.share, cpu)
        elif stage is not None and stage[1] >= MATTERS:
            left = 1.0 - HALF * stage[1]
            yield self._costing("cheaper", f"{stage_name(stage[0])} at half its cost", left, left)
        yield from self._cached()
        yield from self._unblocked() if self.facts.is_asynchronous else self._awaited()

    def _awaited(self) -> Iterator[Prediction]:
        """Yield coroutines if samples mostly wait, because a worker with coroutines waits for many samples at once."""
        facts, model, now = self.facts, self.model, self.base or self.model.now
        if not facts.concurrency or model.cpu_share >= HALF:
            return
        quicker = self._scaled(max(model.cpu_share, 1.0 / facts.concurrency), 1.0)
        local, remote = quicker.best(facts.config.headroom)
        at_once = lanes(round(facts.samples / max(1, facts.batches)), facts.concurrency)
        chosen = Settings(local=local, remote=remote, prefetch=max(now.prefetch, 2 * at_once * (local + remote)))
        counts = range(1, min(now.workers, chosen.workers))
        alike = (each for each in counts if quicker.rate(Settings(local=each)).value >= model.rate(now).value)
        fewest = next(alike, 0)
        told = f" ({plural(fewest, 'worker')} would do what {now.workers} do)" if fewest else ""
        change = f"a `dpex.AsyncDataset` with num_workers={chosen.workers} instead of {now.workers}{told}"
        condition = f"the storage serves {chosen.workers * facts.concurrency} requests at a time as fast"
        yield self.predicted("awaited", change, chosen, model=quicker, condition=condition)

    def _unblocked(self) -> Iterator[Prediction]:
        """Yield threads for the call that blocks the event loop longest, so that several such calls wait at once."""
        facts, share = self.facts, self.model.cpu_share
        call, waits_s = next(iter(of_cause(facts, "storage")), (None, 0.0))
        if call is None or not is_blocking(facts, call) or not facts.concurrency:
            return
        at_once = min(facts.concurrency, _THREADS, int(facts.cpus) + 4)
        left = max(share, 1.0 - waits_s / max(1e-9, facts.busy_s) * (1.0 - 1.0 / at_once))
        yield self._costing("awaited", f"`await asyncio.to_thread(...)` around {call.title}", left, 1.0)

    def _cached(self) -> Iterator[Prediction]:
        """Yield `dpex.cached` around the part of loading a sample that draws no random numbers."""
        facts, pools = self.facts, self.facts.pools.values()
        part = cachable(facts)
        if part is None or facts.keeps_workers or any(pool.cache_hits + pool.cache_misses for pool in pools):
            return
        if part.wall_s >= MATTERS * facts.busy_s:
            whole = ((part.wall_s, facts.busy_s), (part.cpu_s, facts.cpu_s))
            left = [max(1.0 - CACHED, 1.0 - CACHED * seconds / max(1e-9, all_s)) for seconds, all_s in whole]
            found = self._costing("divided" if part.is_divided else "cached", part.change, *left)
            yield replace(found, condition="the samples fit into memory and more epochs follow")

    def _in_next(self) -> Iterator[Prediction]:
        """Yield changes that reduce the training loop's own work in ``next()``."""
        for cause in WAITS:
            seconds = self.found.by_cause[cause.key]
            if cause.cheaper is None or seconds <= MATTERS * self.facts.wall_s:
                continue
            kind, change, part = cause.cheaper
            if kind == "narrow" and waited_for(self.facts):
                continue
            if self.found.place(cause.key) == TAKING_IN:  # tensors are received as views, at no cost
                change = "tensors instead of Python objects, at a quarter of the time"
            yield self._quicker(kind, change, part * seconds)

    def _on_device(self) -> Iterator[Prediction]:
        """Yield cheaper copies or a cheaper device transform, if the steps wait for them."""
        facts, late = self.facts, waited_for(self.facts)
        if not late:
            return
        kind, change, part = NARROW
        whole_s = facts.feed_copy_s or 0.0
        if late == TRANSFORM:
            kind, change, part = "cheaper", "the device transform at half its cost", HALF
            whole_s = facts.feed_transform_s or 0.0
        saved_s = min(facts.feed_wait_s or 0.0, part * whole_s)
        step_s = max(1e-6, self.model.step_s - saved_s / facts.later_batches)
        yield self.predicted(kind, change, model=replace(self.model, step_s=step_s), shorter_s=saved_s)

    def _quicker(self, kind: str, change: str, saved_s: float) -> Prediction:
        """Predict the effect of ``saved_s`` seconds less of the training loop's own work in ``next()``."""
        count = self.facts.later_batches
        step_s = max(self.facts.work_s / count, self.model.step_s - saved_s / count)
        model = replace(self.model, step_s=min(self.model.step_s, step_s))
        return self.predicted(kind, change, model=model, saved_s=saved_s)

    def _costing(self, kind: str, change: str, wall: float, cpu: float) -> Prediction:
        """Predict the effect of multiplying a batch's wall time by ``wall`` and its CPU time by ``cpu``."""
        return self.predicted(kind, change, model=self._scaled(wall, cpu))

    def _scaled(self, wall: float, cpu: float) -> Model:
        """Return the model with a batch's wall time multiplied by ``wall`` and its CPU time by ``cpu``."""
        model = self.model

        def scaled(pool: PoolCost) -> PoolCost:
            return replace(pool, service_s=pool.service_s * wall, cpu_s=pool.cpu_s * cpu)

        return model.with_costs(scaled(model.local), scaled(model.remote))


def _part(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _arguments(now: Settings, new: Settings) -> str:
    """Return a text with the loader's arguments that change ``now`` to ``new``. If local and remote workers are
    involved, the text has the settings in the tuner's format."""
    if (now.remote and new.local) or (now.local and new.remote):
        return f"{new} instead of {now}"
    each = new.prefetch / max(1, new.workers)
    more = f", with prefetch_factor={each:.0f}" if now.workers and each > max(2.0, now.prefetch / now.workers) else ""
    return f"num_workers={new.workers} instead of {now.workers}{more}"
