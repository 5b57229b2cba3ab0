"""A diagnosis as text and as plain data; `dpex.diagnose.html` makes a page of the same sections. Pure."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from dpex.core.names import INLINE, LOCAL, REMOTE
from dpex.core.readable import duration, fine_percent, percent, rounded, size
from dpex.diagnose import device
from dpex.diagnose.facts import Facts, NodeFacts, PoolFacts
from dpex.diagnose.verdict import LOST_TO, Evidence, Verdict
from dpex.diagnose.what_if import Prediction, ScoredPrediction, WhatIf

WHERE_TIME_GOES = "Where the time goes"
COLUMNS = 100
"""Lines of the text are wrapped at this width: a report is read in terminals, logs and mails."""
_LAST_COLUMN = 16
"""The last column of a table is wrapped, but not more narrowly than this."""
VERSION = 1
"""Of `plain`'s layout; another number means that something was renamed or has gone."""

ADVICE: dict[str, str] = {
    "consumer": "There is nothing to gain from the loader. Look at the training step.",
    "cpu": "Make the dataset's transforms cheaper, or give them more CPUs: more workers here or on a cluster.",
    "storage": "Waiting workers need no CPU: use more of them, or threads (thread_safe=True), or a cache nearby.",
    "transfer": "Move fewer bytes: smaller types (uint8 until the device), tensors instead of objects, crops.",
    "straggler": "Raise the prefetch (prefetch_factor), and look at the slowest samples and batches.",
    "memory": "Raise memory_budget or prefetch_factor so that more batches may be in flight, or make batches smaller.",
    "crowding": "Leave the training loop a CPU: use fewer workers, run fewer programs beside it, or add CPUs.",
    "unknown": "Profile next() (py-spy, cProfile).",
    "sampler": "Make the sampler cheaper: draw the indices of an epoch at once, as a tensor, and yield slices of it.",
    "dispatch": "Make batches larger, or make them in the training process (num_workers=0).",
    "startup": "Keep workers between passes (persistent_workers=True), and shorten what they do at their start.",
    "mixed": "No single change helps much. Begin with the first line under 'What would change it'.",
    "too-early": "Let training run for longer, and ask again.",
}
FAR_DISPATCH = (
    "Make batches larger, or use workers of this machine: each message to a worker on the cluster is a call of Ray's."
)
"""The advice about dispatch to the cluster."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading, a table (may be empty) and lines below it."""

    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


class ReportPart(NamedTuple):
    """A share of wall time, 0 to 1: what for, and in words."""

    cause: str
    name: str
    ratio: float


# -- numbers for people ------------------------------------------------------------------------------------------------


def measure(evidence: Evidence) -> str:
    """Its number with its unit."""
    value = evidence.value
    shown = {"ratio": percent, "s": duration, "bytes": size}.get(evidence.unit)
    return f"{rounded(value)} {evidence.unit}".strip() if shown is None else shown(value)


def _range(prediction: Prediction) -> str:
    return f"{percent(prediction.wait)} ({100 * prediction.low:.0f} to {percent(prediction.high)})"


# -- sections ----------------------------------------------------------------------------------------------------------


def headline(facts: Facts) -> str:
    """Which loader, of which process, over how long."""
    whose = f"{facts.name or 'loader'} ({facts.dataset or 'dataset'}, batch size {facts.batch_size or 'unknown'})"
    rank = f", rank {facts.rank}" if facts.rank else ""
    passes = f", {facts.passes} pass{'es' if facts.passes > 1 else ''}" if facts.passes else ""
    return f"{whose}{rank}: {facts.batches} batches in {facts.wall_s:.1f} s{passes}"


def confidence(verdict: Verdict) -> str:
    """In words."""
    if verdict.cause == "too-early":
        return "too little was measured to conclude anything"
    words = "enough to act on" if verdict.is_sure else "measure again before acting on it"
    return f"confidence {verdict.confidence:.2f} of 1: {words}"


def advice(facts: Facts, verdict: Verdict, what_if: WhatIf | None, recommended: Prediction | None) -> str:
    """What to do first."""
    if verdict.where in (device.COPIES, device.TRANSFORM):
        return device.remedy(facts)
    if recommended is None or what_if is None:
        return FAR_DISPATCH if verdict.cause == "dispatch" and facts.remote else ADVICE[verdict.cause]
    if what_if.wait - recommended.wait < 0.01:
        return f"{recommended.change} is enough: the wait stays at about {_range(recommended)}."
    condition = f", if {recommended.condition}" if recommended.condition else ""
    fall = f"the wait falls from {percent(facts.wait_ratio)} to about {_range(recommended)}"
    return f"{recommended.change}: {fall}{condition}."


def sections(
    facts: Facts, verdict: Verdict, what_if: WhatIf | None, past: Sequence[ScoredPrediction]
) -> tuple[ReportSection, ...]:
    """Everything below the verdict."""
    how = tuple((evidence.name, measure(evidence), evidence.how) for evidence in verdict.evidence)
    found = [ReportSection(title="How do we know", header=("what", "measured", "how"), rows=how)]
    found.append(_where_time_goes(facts, verdict))
    if facts.tickets:
        found.append(_stages(facts))
    if facts.feed_copy_s is not None:
        found.append(_device(facts))
    if facts.transforms:
        found.append(_transforms(facts))
    if facts.slow_samples:
        found.append(_slow_samples(facts))
    if facts.failed_samples:
        found.append(_failed_samples(facts))
    if facts.slowest:
        found.append(_slowest(facts))
    if facts.nodes:
        found.append(_machines(facts.nodes))
    if facts.failed_nodes:
        found.append(ReportSection(title="Machines that failed", lines=facts.failed_nodes))
    if what_if is not None and verdict.cause != "too-early":
        found.append(_changes(what_if))
    if past:
        found.append(_past(past))
    gaps = facts.unmeasured if facts.unmeasured else ("nothing that matters here",)
    found.append(ReportSection(title="What was not measured", lines=gaps))
    return tuple(found)


def parts(facts: Facts, verdict: Verdict) -> tuple[ReportPart, ...]:
    """What the wall time went to: the step, then what is lost, largest first."""
    work = facts.work_s / facts.wall_s if facts.wall_s > 0 else 0.0
    lost = [ReportPart(cause, LOST_TO[cause], share * (1.0 - work)) for cause, share in verdict.shares]
    return (ReportPart("work", "the training step", work), *lost)


def _where_time_goes(facts: Facts, verdict: Verdict) -> ReportSection:
    rows = tuple(
        (part.name, duration(part.ratio * facts.wall_s), percent(part.ratio))
        for part in parts(facts, verdict)
        if part.ratio >= 0.001 or part.cause == "work"
    )
    return ReportSection(title=WHERE_TIME_GOES, header=("the training loop", "seconds", "of its time"), rows=rows)


_WHERE = {INLINE: "the training process", LOCAL: "this machine", REMOTE: "the cluster"}


def _stages(facts: Facts) -> ReportSection:
    rows: list[tuple[str, ...]] = []
    for name, pool in facts.pools.items():
        if pool.tickets:
            rows += [(_WHERE.get(name, name), *row) for row in _stage_rows(pool)]
    header = ("batches made in", "stage", "time per batch", "CPU per batch", "share")
    return ReportSection(title="What a batch takes", header=header, rows=tuple(rows), lines=_shared(facts))


def _shared(facts: Facts) -> tuple[str, ...]:
    """Which of these times are another training's."""
    shared = sum(pool.shared for pool in facts.pools.values())
    if not shared:
        return ()
    return (f"{shared:,} of {facts.tickets:,} batches were made for another training with the same share=.",)


def _stage_rows(pool: PoolFacts) -> Iterator[tuple[str, ...]]:
    total = max(1e-12, pool.busy_s + pool.transit_s)
    stages: tuple[tuple[str, float, float | None], ...] = (
        ("load and transform", pool.load_s, pool.load_cpu_s),
        ("collate", pool.collate_s, pool.collate_cpu_s),
        ("encode", pool.encode_s, pool.encode_cpu_s),
        ("transit", pool.transit_s, None),
    )
    for stage, wall_s, cpu_s in stages:
        if wall_s / total >= 0.001:
            cpu = "" if cpu_s is None else duration(cpu_s / pool.tickets)
            yield stage, duration(wall_s / pool.tickets), cpu, percent(wall_s / total)
    if pool.queued_s:
        yield (
            "part of these: waiting for a CPU",
            duration(pool.queued_s / pool.tickets),
            "",
            percent(pool.queued_s / total),
        )


def _device(facts: Facts) -> ReportSection:
    """What the device did to get its batches, of the time of the training loop."""
    parts = (("copies to it", facts.feed_copy_s), ("device_transform", facts.feed_transform_s))
    known = (*parts, ("training waited for these", facts.feed_wait_s))
    rows = tuple(
        (what, duration(seconds / max(1, facts.batches)), percent(seconds / max(1e-9, facts.wall_s)))
        for what, seconds in known
        if seconds is not None
    )
    header, title = ("the device", "time per batch", "share"), "The device's batches"
    told = device.remedy(facts)
    return ReportSection(title=title, header=header, rows=rows, lines=(told,) if told else ())


def _transforms(facts: Facts) -> ReportSection:
    known = sorted(facts.transforms or (), key=lambda one: -one.all_wall_s)
    total = max(1e-12, sum(one.all_wall_s for one in known))
    rows = tuple(
        (
            one.name,
            str(one.calls),
            duration(one.wall_s / max(1, one.calls)),
            duration(one.cpu_s / max(1, one.calls)),
            percent(one.all_wall_s / total),
        )
        for one in known
    )
    header = ("transform", "calls timed", "time per call", "CPU per call", "share")
    how = "Timed in some of the batches; a transform's time leaves out the transforms that it calls."
    return ReportSection(title="Transforms", header=header, rows=rows, lines=(how,))


_NETWORK = ("network while sending", "sent again", "round trip")


def _machines(nodes: Sequence[NodeFacts]) -> ReportSection:
    """Slowest first."""
    ordered = sorted(nodes, key=lambda node: -node.busy_s / max(1, node.tickets))
    is_measured = any(node.sending_s for node in ordered)
    rows = tuple((*_machine(node), *(_network(node) if is_measured else ())) for node in ordered)
    header = ("machine", "batches", "time per batch", "CPU per batch", "waiting for a CPU")
    network = _NETWORK if is_measured else ()
    lines = (f"All batches were made on one machine: {ordered[0].name}.",) if len(ordered) == 1 else ()
    return ReportSection(
        title="Slowest machines" if len(ordered) > 1 else "Machines", header=(*header, *network), rows=rows, lines=lines
    )


def _machine(node: NodeFacts) -> tuple[str, ...]:
    each = max(1, node.tickets)
    queued = "" if node.queued_s is None else duration(node.queued_s / each)
    return (node.name, str(node.tickets), duration(node.busy_s / each), duration(node.cpu_s / each), queued)


def _network(node: NodeFacts) -> tuple[str, ...]:
    """Return what a machine's connection carries while something is under way, the part sent again, and the round
    trip."""
    if not node.sending_s:
        return ("",) * len(_NETWORK)
    bandwidth = f"{size(node.sent_bytes / node.sending_s)}/s"
    lost = fine_percent(node.resent_bytes / max(1, node.sent_bytes + node.resent_bytes))
    return (bandwidth, lost, duration(node.round_trip_s))


def _slow_samples(facts: Facts) -> ReportSection:
    rows = tuple(
        (slow.index, duration(slow.seconds), f"{slow.mean_ratio:.3g}", str(slow.times)) for slow in facts.slow_samples
    )
    header = ("dataset index", "time", "times the mean sample", "how often so slow")
    return ReportSection(title="Slowest samples", header=header, rows=rows, lines=("Since the loader was made.",))


def _failed_samples(facts: Facts) -> ReportSection:
    count = facts.failed_samples
    return ReportSection(
        title="Samples that could not be loaded",
        header=("dataset index", "error"),
        rows=tuple((failed.shown, failed.error) for failed in facts.latest_failed),
        lines=(f"{count:,} sample{'s' if count > 1 else ''} failed; others have their places. The latest are named.",),
    )


def _slowest(facts: Facts) -> ReportSection:
    rows = tuple(
        (f"{slow.number} of pass {slow.epoch + 1}", duration(slow.seconds), duration(slow.load_cpu_s), slow.indices)
        for slow in facts.slowest[:5]
    )
    header = ("batch", "time", "CPU", "dataset indices")
    return ReportSection(title="Slowest batches", header=header, rows=rows, lines=("Since the loader was made.",))


def _changes(what_if: WhatIf) -> ReportSection:
    ordered = sorted(what_if.predictions, key=lambda one: one.wait)
    rows = tuple(
        (one.change, f"{one.rate:.3g}/s", _range(one), f"if {one.condition}" if one.condition else "")
        for one in ordered
    )
    own = (
        "Predicted by replaying the measurements. For the present setting the replay gives a wait of "
        f"{percent(what_if.modelled)}, and {percent(what_if.wait)} was measured; predictions are corrected by that."
    )
    header = ("change", "batches", "wait (range)", "")
    return ReportSection(title="What would change it", header=header, rows=rows, lines=(own,))


def _past(past: Sequence[ScoredPrediction]) -> ReportSection:
    rows = tuple((one.change, percent(one.predicted_wait), percent(one.wait)) for one in past[-8:])
    mean = sum(one.error for one in past) / len(past)
    decisions = f"{len(past)} decision{'s' if len(past) > 1 else ''}"
    lines = (f"Over {decisions} the predicted wait was off by {100 * mean:.1f} points on average.",)
    header = ("change", "wait predicted", "wait measured")
    return ReportSection(title="Past predictions", header=header, rows=rows, lines=lines)


def wrapped(text: str, columns: int = COLUMNS) -> list[str]:
    """Lines of that width, at least one; a number and its "%" stay together."""
    lines = textwrap.wrap(text.replace(" %", "\u00a0%"), columns, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\u00a0%", " %") for line in lines] or [""]


# -- text --------------------------------------------------------------------------------------------------------------


def summary(facts: Facts, verdict: Verdict, what_if: WhatIf | None, recommended: Prediction | None) -> str:
    """The head of the text, each sentence on a line: what was measured, the verdict, and what to do first."""
    lines = [
        f"dpex diagnosis of {headline(facts)}",
        "",
        f"{verdict.title.upper()}: {verdict.sentence}",
        f"({confidence(verdict)})",
        "",
        f"First: {advice(facts, verdict, what_if, recommended)}",
    ]
    return "\n".join(lines)


def text(
    facts: Facts,
    verdict: Verdict,
    what_if: WhatIf | None,
    past: Sequence[ScoredPrediction],
    recommended: Prediction | None,
) -> str:
    """For a terminal."""
    head = summary(facts, verdict, what_if, recommended).splitlines()
    lines = [part for line in head for part in wrapped(line)]
    for section in sections(facts, verdict, what_if, past):
        lines += ["", section.title, *_table(section)]
        for line in section.lines:
            first, *rest = wrapped(line, COLUMNS - 4)
            lines += [f"  - {first}", *(f"    {more}" for more in rest)]
    return "\n".join(lines)


def _table(section: ReportSection) -> Iterator[str]:
    rows = [section.header, *section.rows] if section.rows else []
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(section.header))]
    last_at = 2 + sum(width + 2 for width in widths[:-1])
    for row in rows:
        begin = (
            "  " + "".join(cell.ljust(width) + "  " for cell, width in zip(row, widths, strict=False))[: last_at - 2]
        )
        last, *rest = wrapped(row[-1], max(_LAST_COLUMN, COLUMNS - last_at))
        yield (begin + last).rstrip()
        yield from (" " * last_at + line for line in rest)


# -- data --------------------------------------------------------------------------------------------------------------


def plain(
    facts: Facts,
    verdict: Verdict,
    what_if: WhatIf | None,
    past: Sequence[ScoredPrediction],
    recommended: Prediction | None,
) -> dict[str, Any]:
    """JSON-able, see `dpex.diagnose.diagnosis.Diagnosis.to_dict`."""
    shown = dict(_plain(verdict))
    shown |= {"title": verdict.title, "is_sure": verdict.is_sure, "shares": dict(verdict.shares)}
    measured = dict(_plain(facts))
    measured |= {"wall_s": facts.wall_s, "wait_s": facts.wait_s}
    measured |= {"lost_ratio": facts.lost_ratio, "wait_ratio": facts.wait_ratio}
    for pool in measured["pools"].values():
        pool.pop("services_s")
    return {
        "version": VERSION,
        "verdict": shown,
        "advice": advice(facts, verdict, what_if, recommended),
        "recommendation": _plain(recommended),
        "what_if": _plain(what_if),
        "scores": _plain(tuple(past)),
        "facts": measured,
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
