"""The verdict on a job: the rank that starves it, since when, why, and the cost for all ranks. Pure.

If the ranks of a job synchronise in each step, as under DDP, they wait in their steps for the slowest rank. So all
ranks report a training-bound run, except the rank that waits for data. Batch *k* of a loader is step *k* of the job.
The loss of step *k* is the longest wait of any rank for batch *k*. Without the waits of one rank, the loss would be the
longest wait of the other ranks. The difference of the two is this rank's part of the loss.

If two ranks have equally slow workers, only the rank whose batch is late waits, while the other rank has batches ready.
So a rank counts as *slow* if its time per batch (busy seconds divided by workers) explains half of the loss.

1. If one rank causes at least `MAIN` of the loss, and no other rank is slow, this rank starves the job.
2. Else, if the parts of all ranks sum to at least `HALF` of the loss, and batch times differ by `UNEVEN`, the straggler
   moves. A slow machine is slow in each step, so a moving straggler shows that batches differ in cost.
3. Else the slow ranks starve the job: all alike, all ranks of a node, or several.

A step of the job takes at least as long as the quickest steps of the fastest rank, so the loss of a batch is at most
the rest of the batch's time. If the ranks did not synchronise in each step, the sum of the waits is larger.

The start of each pass is excluded. A loss below `LIMIT` of the time does not count. A loss of several ranks does not
count below `SMALL`, because the longest of many short waits for a CPU reaches this share.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from dpex.diagnose.report import ReportSection, listed, table, wrapped
from dpex.diagnose.verdict import FEW_BATCHES, LIMIT, SMALL
from dpex.measure.readable import duration, percent, plural, rounded

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis

MAIN, HALF = 2 / 3, 1 / 2
"""Shares of the loss; see the module. Two ranks that take turns at random cause about a half each."""
UNEVEN = 2.0
"""Minimum `RankReport.unevenness` from which times of batches count as different."""
UNKNOWN = 0.001
"""Minimum share of a batch's time that is left without the loss. A rate calculated from a smaller rest would consist of
rounding errors."""
QUICK = 0.05
"""Quantile of step times for `RankReport.quick_step_s`. In its quick steps, a rank waits least for other ranks."""
WINDOWS, SHORTEST = 40, 5
"""`_period` divides the batches into about `WINDOWS` windows, each with at least `SHORTEST` batches."""
STEADY = 0.8
"""A rank starves the job until the end if, from some window on, it does so in at least this share of the windows."""


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """The report of a rank to the other ranks.

    Attributes:
        node: The name of the rank's machine.
        batch_s: Mean seconds of a step of the job, which is a wait and a step of this rank.
        step_s: Mean seconds of this rank's step.
        quick_step_s: 5th percentile of the seconds of this rank's steps; 0: not measured.
        supply_s: Mean seconds that a worker takes for a batch, divided by the number of workers.
        unevenness: 95th percentile of the times of the rank's batches, divided by their mean.
        wait_ratio: Share of the rank's time in ``next()``.
        title, sentence, advice, text: Parts of the rank's own diagnosis.
        waits: Seconds of wait for each of the latest batches, from number ``first`` on.
        ago_s: Seconds from each of these batches to the last; not sent to other ranks.
    """

    rank: int
    node: str
    batches: int
    batch_s: float
    step_s: float
    supply_s: float
    unevenness: float
    wait_ratio: float
    title: str
    sentence: str
    advice: str
    text: str
    first: int
    waits: Sequence[float]
    ago_s: Sequence[float] = ()
    quick_step_s: float = 0.0

    @classmethod
    def of(cls, found: Diagnosis, rank: int, node: str, *, full: bool = False) -> RankReport:
        """Return the report of this rank. If the GPU's stall was measured, the waits are scaled down to its share."""
        facts, waits = found.facts, found.facts.batch_waits
        stall, wait = facts.gpu_stall_ratio, facts.running_wait_ratio
        covered = 1.0 if stall is None or wait <= 0 else min(1.0, stall / wait)
        last = waits.at[-1] if waits.at else 0.0
        services = sorted(facts.services_s) or [0.0]
        mean_s = max(1e-9, sum(services) / len(services))
        steps = zip(waits.at, waits.at[1:], waits.seconds[1:], strict=False)
        steps_s = sorted(then - before - wait_s for before, then, wait_s in steps) or [0.0]
        return cls(
            rank=rank,
            node=node,
            batches=facts.batches,
            batch_s=facts.running_s / max(1, facts.batches),
            step_s=facts.work_s / max(1, facts.batches),
            supply_s=facts.busy_s / max(1, facts.tickets) / max(1, facts.workers),
            unevenness=services[int(0.95 * len(services))] / mean_s,
            wait_ratio=facts.running_wait_ratio,
            title=found.verdict.title,
            sentence=found.verdict.sentence,
            advice=found.advice,
            text=found.full if full else str(found),
            first=waits.first,
            waits=[round(covered * wait_s, 5) for wait_s in waits.seconds],
            ago_s=[last - at for at in waits.at],
            quick_step_s=max(0.0, steps_s[int(QUICK * len(steps_s))]),
        )

    def sent(self) -> dict[str, Any]:
        """Return what other ranks need, for JSON."""
        return {**vars(self), "ago_s": ()}


@dataclass(frozen=True, kw_only=True)
class JobDiagnosis:
    """The verdict on a job. ``str()`` is the report, with the diagnosis of the most important rank.

    Attributes:
        verdict: "rank" (one or several), "node", "moving", "alike", "none" (loading does not limit the job) or
            "too-early".
        culprits: The ranks that starve the job.
        since: The first batch that ``culprits`` delayed, or None.
        until: The last batch that ``culprits`` delayed; None: until the end.
        lost_ratio: Share of all ranks' time that is lost to loading, 0 to 1.
        lost_s: Seconds that each batch costs all ranks.
        shares: The part of the loss that each rank alone causes, by rank.
        sentence: The verdict in one or two sentences.
        advice: The first step to take.
        ranks: The reports of all ranks.
        missing: Ranks without a report.
        ago_s: Seconds from the batch ``since`` to the last batch.
    """

    verdict: str
    culprits: tuple[int, ...] = ()
    since: int | None = None
    until: int | None = None
    lost_ratio: float = 0.0
    lost_s: float = 0.0
    shares: dict[int, float]
    sentence: str
    advice: str
    ranks: tuple[RankReport, ...]
    missing: tuple[int, ...] = ()
    ago_s: float | None = None

    @property
    def worst(self) -> RankReport:
        """The report of the rank that waits most, among the culprits if there are any."""
        among = [one for one in self.ranks if one.rank in self.culprits] or self.ranks
        return max(among, key=lambda one: sum(one.waits))

    def __str__(self) -> str:
        nodes = len({one.node for one in self.ranks})
        batches = max(one.batches for one in self.ranks)
        head = f"dpex diagnosis of the job: {plural(len(self.ranks), 'rank')} on {plural(nodes, 'node')}"
        lines = [f"{head}, {batches} batches each", "", *wrapped(self.sentence), *table(self._table())]
        if self.missing:
            lines += listed([f"No report came from rank {', '.join(map(str, self.missing))}."])
        lines += ["", *wrapped(f"First: {self.advice}"), "", f"The report of rank {self.worst.rank}:", ""]
        return "\n".join([*lines, self.worst.text])

    __repr__ = __str__

    def _table(self) -> ReportSection:
        header = ("rank", "node", "wait", "step", "costs the job", "by itself")
        rows = tuple(
            (str(one.rank), one.node, percent(one.wait_ratio), duration(one.step_s), percent(cost), one.title)
            for one in sorted(self.ranks, key=lambda one: -sum(one.waits))[:8]
            for cost in [self.shares.get(one.rank, 0.0) * self.lost_ratio]
        )
        return ReportSection(title="", header=header, rows=rows)

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a dict for programs. It lacks the text of each rank, and the waits for its batches."""
        left_out = ("waits", "ago_s", "text", "first")
        ranks = [{name: value for name, value in vars(one).items() if name not in left_out} for one in self.ranks]
        return {**vars(self), "shares": {str(rank): part for rank, part in self.shares.items()}, "ranks": ranks}


def judge(ranks: Sequence[RankReport], missing: Sequence[int] = ()) -> JobDiagnosis:
    """Return the verdict on the reports of all ranks. Only the report of this process has ``ago_s``."""
    first = max(one.first for one in ranks)
    count = max(0, min(one.first + len(one.waits) for one in ranks) - first)
    waits = {one.rank: one.waits[first - one.first :][:count] for one in ranks}
    lost = [max(each) for each in zip(*waits.values(), strict=True)]
    shares = {rank: _share_of_loss(_gains(waits, {rank}, lost), lost) for rank in waits}
    batch_s = max(1e-9, sum(one.batch_s for one in ranks) / len(ranks))
    waited_s = sum(lost) / max(1, count)
    lost_s = min(waited_s, max(0.0, batch_s - min(one.quick_step_s for one in ranks)))
    ratio = min(1.0, lost_s / batch_s)
    slow = {one.rank for one in ranks if one.supply_s - (batch_s - lost_s) >= HALF * lost_s}
    verdict, culprits = _verdict(ranks, len(lost), ratio, shares, slow)
    since = until = ago_s = None
    if culprits:
        since, until = _period(_gains(waits, set(culprits), lost), lost, batch_s)
        ago = next((one.ago_s[first - one.first :] for one in ranks if one.ago_s), ())
        ago_s, since, until = ago[since] if ago else None, first + since, None if until is None else first + until
    found = JobDiagnosis(
        verdict=verdict,
        culprits=culprits,
        since=since,
        until=until,
        lost_ratio=ratio,
        lost_s=lost_s,
        shares=shares,
        sentence="",
        advice="",
        ranks=tuple(ranks),
        missing=tuple(missing),
        ago_s=ago_s,
    )
    return _with_sentences(found, batch_s, is_bound=waited_s > lost_s)


def _verdict(
    ranks: Sequence[RankReport], batches: int, ratio: float, shares: dict[int, float], slow: set[int]
) -> tuple[str, tuple[int, ...]]:
    if batches < FEW_BATCHES:
        return "too-early", ()
    worst = max(ranks, key=lambda one: shares[one.rank])
    is_alone = shares[worst.rank] >= MAIN and slow <= {worst.rank}
    if ratio < (LIMIT if is_alone else SMALL):
        return "none", ()
    uneven = max(one.unevenness for one in ranks if one.rank in slow | {worst.rank})
    if not is_alone and sum(shares.values()) >= HALF and uneven >= UNEVEN:
        return "moving", ()
    members = {worst.rank} if is_alone else slow | {rank for rank, part in shares.items() if part >= HALF}
    if not members or len(members) == len(ranks):
        return "alike", ()
    nodes = {one.node for one in ranks if one.rank in members}
    is_node = len(nodes) == 1 and members == {one.rank for one in ranks if one.node in nodes} and len(members) > 1
    return ("node" if is_node else "rank"), tuple(sorted(members))


def _gains(waits: dict[int, Sequence[float]], of: Collection[int], lost: Sequence[float]) -> list[float]:
    """Return the seconds that each step would gain if these ranks never waited."""
    others = [one for rank, one in waits.items() if rank not in of]
    if not others:
        return list(lost)
    return [all_s - max(each) for all_s, each in zip(lost, zip(*others, strict=True), strict=True)]


def _share_of_loss(gains: Sequence[float], lost: Sequence[float]) -> float:
    return sum(gains) / max(1e-12, sum(lost))


def _period(gains: Sequence[float], lost: Sequence[float], batch_s: float) -> tuple[int, int | None]:
    """Return the first and the last batch of the period in which the ranks with these gains starve the job.

    The last batch is None if the period lasts until the end.
    """
    size = max(SHORTEST, len(lost) // WINDOWS)
    starts = range(0, len(lost), size)
    parts = [(gains[at : at + size], lost[at : at + size]) for at in starts]
    starved = [_share_of_loss(*part) >= HALF and sum(part[1]) >= LIMIT * batch_s * len(part[1]) for part in parts]
    for at, is_starved in enumerate(starved):
        if is_starved and sum(starved[at:]) >= STEADY * len(starved[at:]):
            return starts[at], None
    if not any(starved):
        return 0, None
    last = len(starved) - starved[::-1].index(True)
    return starts[starved.index(True)], min(len(lost), last * size) - 1


# -- words -------------------------------------------------------------------------------------------------------------


def _with_sentences(found: JobDiagnosis, batch_s: float, *, is_bound: bool) -> JobDiagnosis:
    """Add sentence and advice. ``is_bound``: The sum of the waits exceeds the loss, so the loss is an upper bound."""
    worst, others = found.worst, [one for one in found.ranks if one.rank not in found.culprits]
    most = "at most " if is_bound else ""
    costs = f"Each batch costs all ranks {most}{duration(found.lost_s)}, {percent(found.lost_ratio)} of their time."
    left_s = batch_s - found.lost_s
    rate = f"The job makes {rounded(1 / batch_s)} batches/s. Its rate without the loss is not known, because the "
    rate += "ranks did not wait for each other in each step."
    if left_s > UNKNOWN * batch_s and not is_bound:
        rate = f"Without it the job would make {rounded(1 / left_s)} batches/s instead of {rounded(1 / batch_s)}."
    advice = f"on rank {worst.rank}: {worst.advice}"
    if found.verdict == "too-early":
        sentence, advice = "TOO EARLY TO SAY: too few batches were measured on all ranks.", "Let training run longer."
    elif found.verdict == "none":
        sentence = f"LOADING DOES NOT LIMIT THE JOB: waits for batches cost it {percent(found.lost_ratio)} of its time."
        advice = "Look at the training step. A step that is slow on one rank shows in a profiler, not here."
    elif found.verdict == "moving":
        turns = ", ".join(f"rank {rank} {percent(part)}" for rank, part in found.shares.items() if part >= LIMIT)
        sentence = (
            f"THE STRAGGLER MOVES: different ranks wait for data in turn ({turns} of the loss). No machine is slow: "
            f"batches differ in cost. {costs} {rate}"
        )
        advice = f"A larger `prefetch_factor` evens out batches that cost differently. {advice[:1].upper()}{advice[1:]}"
    elif found.verdict == "alike":
        sentence = f"LOADING LIMITS ALL RANKS ALIKE: they wait for data at the same time. {costs} {rate}"
    else:
        who = f"RANK {' AND '.join(map(str, found.culprits))}" if found.verdict == "rank" else f"NODE {worst.node}"
        is_one = found.verdict == "node" or len(found.culprits) == 1
        starve, it = ("STARVES", "it waits") if is_one else ("STARVE", "they wait")
        step = next((f": {duration(one.step_s)} instead of {duration(worst.step_s)}" for one in others), "")
        sentence = (
            f"{who} {starve} THE JOB, {_when(found)}: {it} for data, and the other ranks wait in their steps{step}. "
            f"{costs} {rate} The cause is {worst.title}: {worst.sentence}"
        )
    return replace(found, sentence=sentence, advice=advice)


def _when(found: JobDiagnosis) -> str:
    if found.until is not None:
        return f"from batch {found.since} to {found.until}"
    if not found.since:
        return "in all batches"
    ago = "" if found.ago_s is None else f", {found.ago_s:.0f} s before the latest"
    return f"since batch {found.since}{ago}"
