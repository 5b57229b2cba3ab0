"""The law: how many workers and how large a prefetch, from one model and a few rules. PURE, time is in the samples.

1. *Start* with the CPUs that are granted, at most 8.
2. *Jump* to the workers that the model asks for (`Model.best`) while the training loop waits.
3. *Little's law*: growth that makes batches slower instead of more has met a limit, whatever it is. Go back to as many
   workers as the limit can have busy, R * S, and leave the larger setting alone for a while.
4. *Probe* what the model cannot know, a step up or down, where the loop waits and the model knows nothing better.
5. *Change*: forget all but the setting.
6. *Give back* workers that are not at work once the loop has not waited for a while.
7. Limits hold in every window.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from dpex.autotune.checked import SampleChecker
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.felt import Felt
from dpex.autotune.law import wording
from dpex.autotune.law.constants import CONSTANTS, Constants
from dpex.autotune.law.evidence import Evidence, Record
from dpex.autotune.law.model import Model, Place, Start
from dpex.autotune.law.walls import allowed, walls
from dpex.autotune.types import Decision, Outcome, Reason, Sample, Settings, Signal
from dpex.core.names import LOCAL, REMOTE, WORKER_POOLS

PATIENCE_S = 30.0
"""Workers that have not started by then are not waited for."""
SAME = 0.02
"""Rates that differ by less are the same."""
WORTH = 1.1
"""Ratio of numbers of workers below which a change is not worth a decision."""
UNSURE = 0.2
"""Relative error of a rate by Little's law from the first batches."""
_ROUNDING_S = 1e-9

GROW, PROBE, BACK, GIVE_BACK = "grow", "probe", "back", "give back"


def start(config: AutotuneConfig, cpus: float, constants: Constants = CONSTANTS) -> Settings:
    """The setting to begin with, on ``cpus`` CPUs that are granted to this rank."""
    most = math.inf if config.max_local is None else config.max_local
    local = int(max(config.min_local, min(constants.start, max(1, int(cpus)), most)))
    local = max(local, int(not config.min_remote))
    prefetch = max(1, constants.start_depth * (local + config.min_remote))
    return Settings(local=local, remote=config.min_remote, prefetch=min(prefetch, config.max_prefetch or prefetch))


@dataclass(kw_only=True)
class Trial:
    """A change of workers that is watched. number: of its decision. old, before: the setting and the windows before it.

    net_s, wall_s: service times before, without and with queueing for a CPU. lost: what the change that this one undoes
    has lost, as a share of the rate.
    """

    kind: str
    number: int
    at: float
    old: Settings
    before: Record
    net_s: float
    wall_s: float
    lost: float = math.inf
    made: int = 0
    worker_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """On a trial. gain: relative, of the rate; wanted: what that should be. is_sure: more windows would not change it.

    is_fine: the loop no longer waits. is_held_up: batches take longer than the number of workers alone explains.
    """

    is_fine: bool = False
    is_sure: bool = True
    is_worse: bool = False
    is_held_up: bool = False
    gain: float = 0.0
    wanted: float = 0.0

    @property
    def has_met_limit(self) -> bool:
        """Return True if growth made batches slower instead of more."""
        return self.is_held_up and self.gain < self.wanted


@dataclass
class Failure:
    """A number of workers that was no good: until when it is left alone, and how often that was so."""

    until: float
    times: int


class Law:
    """See the module.

    Attributes:
        decisions: All that were taken, oldest first, with what they brought.
        model: What is known of the work; None before the first batches.
    """

    def __init__(self, config: AutotuneConfig, begin: Settings, constants: Constants = CONSTANTS) -> None:
        self.config = config
        self._k = constants
        self._begin = begin
        self._checker, self._felt = SampleChecker(), Felt()
        self._asked_at = self._settled_at = 0.0
        self._running, self._before = -1, 0
        self._pass, self._started = (-1, 0.0), 1
        self._signal: Signal = "wait"
        self.decisions: list[Decision] = []
        self.model: Model | None = None
        self._forget()

    def begin(self) -> Settings:
        """The setting to begin with."""
        return self._begin

    def useful_remote(self, most: int) -> int | None:
        """The number of remote workers that would pay if the cluster had places for ``most``; None if unknown."""
        if self.model is None:
            return None
        model = self.model.with_remote(most)
        local, remote = model.best(self._k.headroom)
        wanted = Settings(local=local, remote=remote)
        if model.rate(wanted).value <= model.rate(model.now).value * (1.0 + self.config.gain):
            return model.now.remote
        return remote

    def step(self, sample: Sample) -> Decision | None:
        """Take in a window, any legal one; return a change of settings, or None."""
        checked = self._checker.check(sample)
        if checked is None or not (checked.batches or checked.wait_s):
            return None
        felt = self._felt.of(checked)
        if not felt.is_known:
            return None
        self._signal = felt.signal
        if felt.is_new:
            self._forget()
        return self._step(felt.sample)

    def _step(self, sample: Sample) -> Decision | None:
        if self._evidence.changes(sample):
            self._forget()
        self._evidence.add(sample)
        inside = self._inside(sample)
        if inside.workers < sample.settings.workers or inside.prefetch < min(
            sample.settings.prefetch, sample.settings.workers
        ):
            self._asked_at = sample.at
            return self._decided(sample, inside, "limit")
        if self._trial is not None:
            self._trial.made += sample.local.tickets
            at_work = min(self._before, sample.local.running, sample.settings.prefetch)
            self._trial.worker_s += at_work * sample.seconds
        self._before = sample.local.running
        if not self._is_settled(sample):
            return self._decide_early(sample)
        self._record.add(sample, self._k.goal)
        return self._decide(sample)

    def _inside(self, sample: Sample) -> Settings:
        """The present setting within the limits, with no more local workers than there is memory for their batches."""
        inside = allowed(self.config, sample, sample.settings)
        if inside.prefetch >= inside.workers:
            return inside
        hard = walls(self.config, sample)
        local = max(min(inside.local, hard.most_local(1.0), hard.prefetch), hard.least_local, int(not inside.remote))
        return replace(
            inside, local=local, prefetch=max(1, min(2 * (local + inside.remote), hard.most_prefetch(local)))
        )

    def _decide_early(self, sample: Sample) -> Decision | None:
        """Before the setting has been running for the time of a batch: end growth that has gone wrong, or take the
        first jump since the work became known, which needs no windows to compare with."""
        if self._trial is not None:
            return self._judge(sample, self._trial) if self._is_slow(sample) else None
        made = sum(pool.net.count for pool in self._evidence.pools.values())
        waits = sample.wait_s > self._k.goal * sample.seconds
        if not self._is_fresh or not waits or not self._evidence.step.count or made < min(self._k.start, self._running):
            return None
        self.model = self._known(sample)
        return self._grow(sample)

    # -- what is known -------------------------------------------------------------------------------------------------

    def _forget(self) -> None:
        """The work is another: keep the setting only."""
        self._evidence = Evidence(self._k)
        self._record = Record(self._k)
        self._trial: Trial | None = None
        self._depth = self._k.depth
        self._keeps = False
        self._is_fresh = True
        self._open()

    def _open(self) -> None:
        """Nothing is known to have failed."""
        self._link = math.inf
        self._failed: tuple[int, int] | None = None
        self._failed_growths, self._grow_at = 0, 0.0
        self._failures: dict[tuple[int, int], Failure] = {}
        self._probe_at, self._failed_probes = 0.0, 0
        self._falls = False

    def _is_settled(self, sample: Sample) -> bool:
        """Return True if what was asked for has been running for the time of a batch when the window began."""
        running = sample.local.running + sample.remote.running
        missing = sample.settings.workers - sample.remote.unplaced - running
        if missing > 0 and sample.at - self._asked_at < PATIENCE_S:
            return False
        if running != self._running:
            self._running, self._settled_at = running, sample.at
            self._record = Record(self._k)
        since = min(self._evidence.service_s(LOCAL), PATIENCE_S)
        return sample.at - sample.seconds >= self._settled_at + since - _ROUNDING_S

    def _known(self, sample: Sample) -> Model:
        """The model as of this window."""
        seen, machine, record = self._evidence, sample.machine, self._record
        local, remote = (self._place(name) for name in WORKER_POOLS)
        stages = seen.pools[LOCAL if seen.pools[LOCAL].net.count else REMOTE].stages
        total = sum(stages.values())
        rate, error = record.rate()
        waits = record.wait > self._k.goal
        return Model(
            now=sample.settings,
            local=local,
            remote=remote,
            step_s=max(1e-6, seen.step.value),
            step_cpu_s=min(seen.trainer_cpu.value, max(1e-6, seen.step.value)),
            cpus=machine.cpus,
            others=seen.others,
            walls=walls(self.config, sample),
            unevenness=seen.unevenness,
            measured_rate=rate if waits and rate else None,
            error=min(1.0, error / rate) if rate else 1.0,
            start=self._start_of(sample),
            stages={name: seconds / total for name, seconds in stages.items()} if total else {},
        )

    def _start_of(self, sample: Sample) -> Start | None:
        """What the start of the latest pass took, and with how many workers, where passes start workers anew."""
        if not sample.starts_anew or not sample.pass_batches:
            return None
        if self._pass != (sample.epoch, sample.start_s):
            self._pass, self._started = (sample.epoch, sample.start_s), max(1, sample.settings.local)
        return Start(seconds=sample.start_s, workers=self._started, batches=sample.pass_batches)

    def _place(self, name: str) -> Place:
        pool, k = self._evidence.pools[name], self._k
        service_s = max(self._evidence.service_s(name), pool.net.lately(4 * k.start))
        other = self._evidence.pools[REMOTE if name == LOCAL else LOCAL]
        most = math.inf if name == LOCAL or math.isinf(self._link) else self._link / max(1e-9, service_s)
        known = pool if pool.net.count else other
        share = known.cpu.value / max(1e-9, known.net.value)
        return Place(service_s=service_s, cpu_s=min(1.0, share) * service_s, most_rate=most)

    # -- deciding ------------------------------------------------------------------------------------------------------

    def _decide(self, sample: Sample) -> Decision | None:
        if not self._evidence.service_s(LOCAL) or not self._evidence.step.count:
            return None
        self.model = self._known(sample)
        if self._trial is not None:
            decision = self._judge(sample, self._trial)
            if decision is not None or self._trial is not None:
                return decision
        if self._record.wait <= self._k.goal:
            return self._give_back(sample)
        return self._grow(sample) or self._widen(sample)

    def _grow(self, sample: Sample) -> Decision | None:
        """Towards what the model asks for."""
        k, now, record = self._k, sample.settings, self._record
        if now.remote and len(record) >= k.least and record.pending > k.least / 2:
            busy = record.remote_busy_s / record.seconds
            if busy < 0.7 * sample.remote.running:  # batches wait to be made: the link is full
                self._link = min(self._link, max(1, math.ceil(k.headroom * busy)))
        if sample.at < self._grow_at:
            return None
        local, remote = self._target(sample)
        local, remote = max(local, now.local), max(remote, now.remote)
        if local + remote < WORTH * now.workers or local + remote == now.workers:
            return None
        return self._change(sample, local, remote, "too few", GROW)

    def _target(self, sample: Sample) -> tuple[int, int]:
        """The model's best within a jump, and half-way at most to what has failed, in the ratio."""
        assert self.model is not None
        model, k, now = self.model, self._k, sample.settings
        soon = max(math.ceil(k.jump * now.workers), 2 * k.start)
        near = max(soon, model.filling()) if model.cpu_share > 0.5 else soon
        most: dict[str, float] = {LOCAL: near, REMOTE: min(soon, self._link)}
        for name, count in zip(WORKER_POOLS, self._failed or (), strict=False):
            have = getattr(now, name)
            if count > have:
                most[name] = min(most[name], math.ceil(math.sqrt(max(1, have) * count)))
        hard = model.walls
        inside = replace(
            hard,
            local=int(min(hard.local, max(most[LOCAL], hard.least_local), self._most_waiting)),
            remote=int(min(hard.remote, max(most[REMOTE], hard.least_remote))),
        )
        return model.best(k.headroom, inside)

    @property
    def _most_waiting(self) -> int:
        return max(self.config.max_waiting, self.config.min_local)

    def _widen(self, sample: Sample) -> Decision | None:
        """More batches in flight, or a probe."""
        assert self.model is not None
        k, record, now, model = self._k, self._record, sample.settings, self.model
        if len(record) < k.least:
            return None
        fit = model.walls.most_local(model.unevenness)
        if (
            record.is_late
            and now.local > fit
            and model.unevenness > k.uneven
            and self._may_try(sample, fit, now.remote)
        ):
            return self._change(sample, fit, now.remote, "limit", None)  # their memory is worth more as prefetch
        if record.is_late or now.workers * model.step_s > model.local.service_s:
            self._depth = k.most_depth
        return self._probe(sample) or self._change(sample, now.local, now.remote, "spread", None)

    def _probe(self, sample: Sample) -> Decision | None:
        """A step up, not beyond what fills the CPUs; first one down where growth has made batches slower: the limit may
        be exceeded already."""
        assert self.model is not None
        k, now, model = self._k, sample.settings, self.model
        filling = model.filling()
        fit = model.walls.most_local(model.unevenness)
        most = {LOCAL: min(fit, self._most_waiting, filling), REMOTE: model.walls.remote}
        if sample.at < self._probe_at or model.start is not None:  # no window shows what more workers cost at the start
            return None
        if self._falls:
            fewer = now.local - max(1, round(now.local * (1.0 - 1.0 / k.step)))
            if max(1, model.walls.least_local) <= fewer and self._may_try(sample, fewer, now.remote):
                return self._change(sample, fewer, now.remote, "explore", PROBE)
        for name in WORKER_POOLS:
            have = getattr(now, name)
            to = min(most[name], max(have + 1, math.ceil(have * k.step)))
            sizes = {LOCAL: now.local, REMOTE: now.remote, name: to}
            if to > have and self._may_try(sample, sizes[LOCAL], sizes[REMOTE]):
                return self._change(sample, sizes[LOCAL], sizes[REMOTE], "explore", PROBE)
        return None

    def _may_try(self, sample: Sample, local: int, remote: int) -> bool:
        failure = self._failures.get((local, remote))
        return failure is None or failure.until <= sample.at

    def _give_back(self, sample: Sample) -> Decision | None:
        """Fewer workers where those there are do not all work, and the loop has not waited for a while; or where they
        take the training thread's CPU."""
        assert self.model is not None
        k, now, record = self._k, sample.settings, self._record
        if len(record) < k.least:
            return None
        local, remote = self._target(sample)
        if record.queued > k.goal and now.local > local:
            to = max(local, math.floor(now.local / k.step)), max(now.remote, remote)
            return self._change(sample, *to, "too many", GIVE_BACK) if self._may_try(sample, *to) else None
        if self._keeps or record.calm < k.calm or record.seconds < 3.0:
            return None
        at_work = k.spare * max(record.busy_s / record.seconds, self.model.local.service_s * self.model.demand)
        wanted = math.ceil(at_work)
        fewer_remote = max(min(now.remote, wanted - now.local), 0, self.model.walls.least_remote)
        fewer = max(min(now.local, wanted - fewer_remote), self.model.walls.least_local, int(not fewer_remote))
        if fewer + fewer_remote > now.workers / WORTH or not self._may_try(sample, fewer, fewer_remote):
            return None
        return self._change(sample, fewer, fewer_remote, "too many", GIVE_BACK)

    # -- judging -------------------------------------------------------------------------------------------------------

    def _is_slow(self, sample: Sample) -> bool:
        """Return True if local batches take so much longer than before that it shows before they have come.

        By Little's law workers that have run for ``worker_s`` seconds in all would have made ``worker_s / s`` by now.
        """
        trial, running = self._trial, sample.local.running
        if trial is None or trial.kind != GROW or sample.settings.local <= trial.old.local:
            return False
        return trial.worker_s > self._k.early * trial.net_s * (trial.made + running)

    def _judge(self, sample: Sample, trial: Trial) -> Decision | None:
        """What a change of workers has brought; a decision if that must be undone."""
        k, seen = self._k, len(self._record)
        is_slow = self._is_slow(sample)
        verdict = self._verdict(sample, trial)
        if not is_slow and not verdict.is_sure and seen < k.longest:
            return None
        took_s = max(0.1, sample.at - trial.at)
        if verdict.is_fine and not is_slow:
            self._close(sample, trial, kept=True)
        elif trial.kind == BACK:
            self._close(sample, trial, kept=True)
            if verdict.gain < verdict.wanted:  # it is not as before: the growth was not to blame
                self._absolve()
        elif trial.kind == GROW:
            if is_slow or verdict.is_worse or verdict.has_met_limit:
                return self._back_to_limit(sample, trial, verdict, took_s)
            self._close(sample, trial, kept=True)
        elif verdict.gain > verdict.wanted:
            self._close(sample, trial, kept=True)
            if trial.kind == PROBE:
                self._probed(sample, trial, verdict)
        else:
            return self._undo(sample, trial, verdict, took_s)
        return None

    def _verdict(self, sample: Sample, trial: Trial) -> Verdict:
        """What the windows so far say of a change.

        Growth was expected to raise the rate by ``ratio``, as far as the training loop takes that much; it has met a
        limit where the rate rose by less than the root of that and batches take longer by more than the root of
        ``ratio``. Anything else must be no worse.
        """
        k, record, now = self._k, self._record, sample.settings
        made = trial.before.is_late or record.is_late
        (rate0, error0), (rate1, error1) = trial.before.rate(made=made), record.rate(made=made)
        if not rate0:
            rate0 = min(trial.old.workers / max(1e-9, trial.wall_s), 1.0 / max(1e-9, self._evidence.step.value))
            error0 = UNSURE * rate0
        if not rate0 or not len(record):
            return Verdict(is_fine=bool(len(record)), is_worse=not len(record), gain=-0.5 if rate0 else 0.0)
        gain, wide = rate1 / rate0 - 1.0, 2.0 * math.hypot(error0, error1) / rate0
        ratio = now.workers / max(1, trial.old.workers)
        grown = record.wall.value / max(1e-9, trial.wall_s)
        bound = max(1.1, ratio**k.part)
        wanted = -SAME if trial.kind == GIVE_BACK else SAME
        if trial.kind == BACK:
            wanted = -k.part * (trial.lost if len(trial.before) else math.inf)
        is_free = False
        if trial.kind == GROW:
            wanted = min(ratio, max(1.0, 1.0 / max(1e-9, self._evidence.step.value * rate0))) ** k.part - 1.0
            is_free = record.net.count >= 2 * now.workers and grown < bound
        is_enough = len(record) >= k.least
        is_fine = is_enough and record.wait <= k.goal
        return Verdict(
            is_fine=is_fine,
            is_sure=is_free or (is_enough and (is_fine or abs(gain - wanted) > wide)),
            is_worse=gain < -wide,
            is_held_up=record.net.count >= k.start and grown > bound,
            gain=gain,
            wanted=wanted,
        )

    def _probed(self, sample: Sample, trial: Trial, verdict: Verdict) -> None:
        """A probe was worth it: the limit to growth there is here, further on, or gone."""
        if sample.settings.workers > trial.old.workers and not verdict.is_held_up:
            self._absolve()
        self._failed_probes = 0

    def _absolve(self) -> None:
        """Growth may go on: nothing was wrong with it, or no longer is. How often it failed is remembered."""
        self._failed, self._grow_at, self._link = None, 0.0, math.inf

    def _undo(self, sample: Sample, trial: Trial, verdict: Verdict, took_s: float) -> Decision | None:
        self._fail(sample, sample.settings, took_s)
        if trial.kind == PROBE:
            self._falls = False
            self._failed_probes += 1
            self._probe_at = sample.at + self._k.pause * took_s * 2**self._failed_probes
        self._keeps |= trial.kind == GIVE_BACK
        self._close(sample, trial, kept=False)
        return self._change(sample, trial.old.local, trial.old.remote, "undo", BACK)

    def _go_back(self, sample: Sample, trial: Trial, to: tuple[int, int], verdict: Verdict) -> Decision | None:
        """Watch whether the rate is what it was before the change that is undone."""
        decision = self._change(sample, *to, "undo", BACK)
        if decision is not None and self._trial is not None:
            self._trial.before, self._trial.wall_s, self._trial.lost = trial.before, trial.wall_s, -verdict.gain
        return decision

    def _back_to_limit(self, sample: Sample, trial: Trial, verdict: Verdict, took_s: float) -> Decision | None:
        """As many workers as the limit that was met can keep busy.

        By Little's law that is the rate now times the time of a batch before; all workers were busy then, so it is
        their number, and more by as much as the rate has grown.
        """
        now, old = sample.settings, trial.old
        fewest = min(now.workers, math.ceil(old.workers * (1.0 + max(0.0, verdict.gain))))
        local = min(now.local, max(old.local, fewest - old.remote))
        remote = min(now.remote, max(old.remote, fewest - local))
        self._failed = now.local, now.remote
        self._failed_growths += 1
        self._grow_at = sample.at + self._k.pause * took_s * 2**self._failed_growths
        self._falls = verdict.is_held_up or verdict.is_worse
        self._close(sample, trial, kept=False)
        return self._go_back(sample, trial, (local, remote), verdict)

    def _close(self, sample: Sample, trial: Trial, *, kept: bool) -> None:
        """The trial is over."""
        self._trial = None
        seen = wording.measured(self._record, sample)
        outcome = Outcome(rate=seen["rate"], wait=seen["wait"], kept=kept, at=sample.at)
        self.decisions[trial.number] = replace(self.decisions[trial.number], outcome=outcome)

    def _fail(self, sample: Sample, settings: Settings, took_s: float) -> None:
        key = settings.local, settings.remote
        times = self._failures[key].times + 1 if key in self._failures else 1
        self._failures[key] = Failure(sample.at + self._k.pause * took_s * 2**times, times)

    # -- changing ------------------------------------------------------------------------------------------------------

    def _change(self, sample: Sample, local: int, remote: int, reason: Reason, kind: str | None) -> Decision | None:
        """Other numbers of workers, with the prefetch for them; of the prefetch alone only if it is worth it."""
        assert self.model is not None
        k, now, model = self._k, sample.settings, self.model
        depth = max(self._depth, min(k.uneven * model.unevenness, k.most_depth))
        wanted = Settings(local=local, remote=remote, prefetch=model.prefetch(local, remote, depth))
        new = allowed(self.config, sample, wanted)
        if new == now:
            return None
        if (new.local, new.remote) == (now.local, now.remote):
            if kind is not None or abs(new.prefetch - now.prefetch) < 0.3 * now.prefetch:
                return None
            return self._decided(sample, new, reason)
        if kind is not None:
            self._trial = Trial(
                kind=kind,
                number=len(self.decisions),
                at=sample.at,
                old=now,
                before=self._record,
                net_s=self._record.net.value or model.local.service_s,
                wall_s=self._record.wall.value or model.local.service_s,
            )
        decision = self._decided(sample, new, reason)
        self._record = Record(k)
        self._is_fresh = False
        self._asked_at = self._settled_at = sample.at
        return decision

    def _decided(self, sample: Sample, new: Settings, reason: Reason) -> Decision:
        model = self.model
        rate = model.rate(new).value if model is not None else 0.0
        wait = model.wait(new).value if model is not None else 0.0
        evidence = wording.evidence(model, self._record, sample) if model is not None else {}
        decision = Decision(
            at=sample.at,
            old=sample.settings,
            new=new,
            reason=reason,
            text="",
            evidence=evidence,
            predicted_rate=rate,
            predicted_wait=wait,
            signal=self._signal,
        )
        failed = self.decisions[-1] if self.decisions else None
        decision = replace(decision, text=wording.decided(decision, sample, failed))
        self.decisions.append(decision)
        return decision
