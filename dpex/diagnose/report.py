"""A diagnosis as text and as plain data; `dpex.diagnose.html` makes a page of the same sections. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, NamedTuple

from dpex.diagnose.facts import Facts, LaneFacts, NodeFacts
from dpex.diagnose.verdict import LOST_TO, Evidence, Verdict
from dpex.diagnose.what_if import Prediction, Scored, WhatIf

WHERE_TIME_GOES = "Where the time goes"
VERSION = 1
"""Of `plain`'s layout; another number means that something was renamed or has gone."""

ADVICE: dict[str, str] = {
    "consumer": "There is nothing to gain from the loader; look at the training step.",
    "cpu": "Make the dataset's transforms cheaper, or let more CPUs compute them: more workers, or the cluster's.",
    "storage": "Workers that wait cost no CPU: more of them, or threads (thread_safe), or a cache nearer by.",
    "transfer": "Send less: smaller types (uint8 until the device), tensors instead of objects, crops.",
    "straggler": "Let more batches be in flight (prefetch_factor), and look at the slowest samples and batches.",
    "memory": "Let more batches be in flight: raise memory_budget or prefetch_factor, or make batches smaller.",
    "crowding": "Leave the training loop a CPU: fewer workers, fewer programs beside it, or more CPUs.",
    "unknown": "Profile next() (py-spy, cProfile): look at the sampler first, as dpex calls it there.",
    "dispatch": "Make batches larger, or make them in the training process (num_workers=0).",
    "startup": "Keep workers between passes (persistent_workers=True), and what they do at their start short.",
    "mixed": "No single change helps much; begin with the first line under 'What would change it'.",
    "too-early": "Let it run for longer, and ask again.",
}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A heading, a table (may be empty) and lines below it."""

    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


class Part(NamedTuple):
    """A share of wall time, 0 to 1: what for, and in words."""

    cause: str
    name: str
    ratio: float


# -- numbers for people ----------------------------------------------------------------------------------------------


def percent(ratio: float) -> str:
    """0.381 → "38 %"."""
    return f"{100 * ratio:.0f} %"


def seconds(value: float) -> str:
    """In the unit that suits: "1.24 s", "35 ms", "80 µs"."""
    factor, unit = (1.0, "s") if value >= 1.0 else (1e3, "ms") if value >= 1e-3 else (1e6, "µs")
    return f"{value * factor:.3g} {unit}" if value * factor < 1000 else f"{value * factor:.0f} {unit}"


def size(nbytes: float) -> str:
    """ "38 MB" and so on."""
    for factor, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if nbytes >= factor:
            return f"{nbytes / factor:.3g} {unit}"
    return f"{nbytes:.0f} B"


def measure(evidence: Evidence) -> str:
    """Its number with its unit."""
    value = evidence.value
    shown = {"ratio": percent, "s": seconds, "bytes": size}.get(evidence.unit)
    return shown(value) if shown is not None else f"{value:.3g} {evidence.unit}".strip()


def _range(prediction: Prediction) -> str:
    return f"{percent(prediction.stall)} ({100 * prediction.low:.0f} to {percent(prediction.high)})"


# -- sections --------------------------------------------------------------------------------------------------------


def headline(facts: Facts) -> str:
    """Which loader, of which process, over how long."""
    whose = f"{facts.name or 'loader'} ({facts.dataset or 'dataset'}, batch size {facts.batch_size or 'unknown'})"
    rank = f", rank {facts.rank}" if facts.rank else ""
    passes = f", {facts.passes} pass{'es' if facts.passes > 1 else ''}" if facts.passes else ""
    return f"{whose}{rank}: {facts.batches} batches in {facts.wall_s:.1f} s{passes}"


def confidence(verdict: Verdict) -> str:
    """In words."""
    if verdict.cause == "too-early":
        return "nothing is concluded from so little"
    words = "sure enough to act on" if verdict.is_sure else "look again before acting on it"
    return f"confidence {verdict.confidence:.2f} of 1: {words}"


def advice(facts: Facts, verdict: Verdict, what_if: WhatIf | None, recommended: Prediction | None) -> str:
    """What to do first."""
    if recommended is None or what_if is None:
        return ADVICE[verdict.cause]
    if what_if.stall - recommended.stall < 0.01:
        return f"{recommended.change} would do: the stall stays at about {_range(recommended)}."
    condition = f", if {recommended.condition}" if recommended.condition else ""
    fall = f"the stall falls from {percent(facts.stall_ratio)} to about {_range(recommended)}"
    return f"{recommended.change}: {fall}{condition}."


def sections(facts: Facts, verdict: Verdict, what_if: WhatIf | None, past: Sequence[Scored]) -> tuple[Section, ...]:
    """Everything below the verdict."""
    how = tuple((evidence.name, measure(evidence), evidence.how) for evidence in verdict.evidence)
    found = [Section(title="How do we know", header=("what", "measured", "how"), rows=how)]
    found.append(_where_time_goes(facts, verdict))
    if facts.tickets:
        found.append(_stages(facts))
    if facts.transforms:
        found.append(_transforms(facts))
    if facts.slow_samples:
        found.append(_slow_samples(facts))
    if facts.slowest:
        found.append(_slowest(facts))
    if facts.nodes:
        found.append(_machines(facts.nodes))
    if what_if is not None and verdict.cause != "too-early":
        found.append(_changes(what_if))
    if past:
        found.append(_past(past))
    gaps = facts.unmeasured if facts.unmeasured else ("nothing that matters here",)
    found.append(Section(title="What was not measured", lines=gaps))
    return tuple(found)


def parts(facts: Facts, verdict: Verdict) -> tuple[Part, ...]:
    """What the wall time went to: the step, then what is lost, largest first."""
    work = facts.work_s / facts.wall_s if facts.wall_s > 0 else 0.0
    lost = [Part(cause, LOST_TO[cause], share * (1.0 - work)) for cause, share in verdict.shares]
    return (Part("work", "the training step", work), *lost)


def _where_time_goes(facts: Facts, verdict: Verdict) -> Section:
    rows = tuple(
        (part.name, seconds(part.ratio * facts.wall_s), percent(part.ratio))
        for part in parts(facts, verdict)
        if part.ratio >= 0.001 or part.cause == "work"
    )
    return Section(title=WHERE_TIME_GOES, header=("the training loop", "seconds", "of its time"), rows=rows)


_WHERE = {"inline": "the training process", "local": "this machine", "remote": "the cluster"}


def _stages(facts: Facts) -> Section:
    rows: list[tuple[str, ...]] = []
    for name, lane in facts.lanes.items():
        if lane.tickets:
            rows += [(_WHERE.get(name, name), *row) for row in _stage_rows(lane)]
    header = ("batches made in", "stage", "wall a batch", "CPU a batch", "share")
    return Section(title="What a batch takes", header=header, rows=tuple(rows))


def _stage_rows(lane: LaneFacts) -> Iterator[tuple[str, ...]]:
    total = max(1e-12, lane.busy_s + lane.transit_s)
    stages: tuple[tuple[str, float, float | None], ...] = (
        ("the dataset", lane.load_s, lane.load_cpu_s),
        ("the collate function", lane.collate_s, lane.collate_cpu_s),
        ("serialisation", lane.encode_s, lane.encode_cpu_s),
        ("on its way", lane.transit_s, None),
    )
    for stage, wall_s, cpu_s in stages:
        if wall_s / total >= 0.001:
            cpu = "" if cpu_s is None else seconds(cpu_s / lane.tickets)
            yield stage, seconds(wall_s / lane.tickets), cpu, percent(wall_s / total)
    if lane.queued_s:
        yield "of these, waiting for a CPU", seconds(lane.queued_s / lane.tickets), "", percent(lane.queued_s / total)


def _transforms(facts: Facts) -> Section:
    known = sorted(facts.transforms or (), key=lambda one: -one.all_wall_s)
    total = max(1e-12, sum(one.all_wall_s for one in known))
    rows = tuple(
        (
            one.name,
            str(one.calls),
            seconds(one.wall_s / max(1, one.calls)),
            seconds(one.cpu_s / max(1, one.calls)),
            percent(one.all_wall_s / total),
        )
        for one in known
    )
    header = ("transform", "calls timed", "wall a call", "CPU a call", "share")
    how = "Of some batches, without the steps within each; shares are taken to be those of all batches."
    return Section(title="Transforms", header=header, rows=rows, lines=(how,))


def _machines(nodes: Sequence[NodeFacts]) -> Section:
    """Slowest first."""
    ordered = sorted(nodes, key=lambda node: -node.busy_s / max(1, node.tickets))
    rows = tuple(
        (
            node.name,
            str(node.tickets),
            seconds(node.busy_s / max(1, node.tickets)),
            seconds(node.cpu_s / max(1, node.tickets)),
            "" if node.queued_s is None else seconds(node.queued_s / max(1, node.tickets)),
        )
        for node in ordered
    )
    header = ("machine", "batches", "time a batch", "CPU", "waiting for a CPU")
    lines = (f"All batches were made on one machine: {ordered[0].name}.",) if len(ordered) == 1 else ()
    return Section(title="Slowest machines" if len(ordered) > 1 else "Machines", header=header, rows=rows, lines=lines)


def _slow_samples(facts: Facts) -> Section:
    rows = tuple(
        (slow.index, seconds(slow.seconds), f"{slow.mean_ratio:.3g}", str(slow.times)) for slow in facts.slow_samples
    )
    header = ("dataset index", "seconds", "times the mean sample", "how often so slow")
    return Section(title="Slowest samples", header=header, rows=rows, lines=("Of all since the loader was made.",))


def _slowest(facts: Facts) -> Section:
    rows = tuple(
        (f"{slow.number} of pass {slow.epoch + 1}", seconds(slow.seconds), seconds(slow.load_cpu_s), slow.indices)
        for slow in facts.slowest[:5]
    )
    header = ("batch", "wall", "CPU", "dataset indices")
    return Section(title="Slowest batches", header=header, rows=rows, lines=("Of all since the loader was made.",))


def _changes(what_if: WhatIf) -> Section:
    ordered = sorted(what_if.predictions, key=lambda one: one.stall)
    rows = tuple(
        (one.change, f"{one.rate:.3g}/s", _range(one), f"if {one.condition}" if one.condition else "")
        for one in ordered
    )
    own = (
        f"Replayed measurements; for the present setting the same replay says {percent(what_if.modelled)}, "
        f"measured was {percent(what_if.stall)}; the others are corrected by what it is off."
    )
    header = ("change", "batches", "stall (from, to)", "")
    return Section(title="What would change it", header=header, rows=rows, lines=(own,))


def _past(past: Sequence[Scored]) -> Section:
    rows = tuple((one.change, percent(one.predicted_stall), percent(one.stall)) for one in past[-8:])
    mean = sum(one.error for one in past) / len(past)
    lines = (f"Over {len(past)} decisions the stall was off by {100 * mean:.1f} points on average.",)
    return Section(title="Past predictions", header=("change", "stall predicted", "came"), rows=rows, lines=lines)


# -- text ------------------------------------------------------------------------------------------------------------


def text(
    facts: Facts,
    verdict: Verdict,
    what_if: WhatIf | None,
    past: Sequence[Scored],
    recommended: Prediction | None,
) -> str:
    """For a terminal."""
    lines = [
        f"dpex diagnosis of {headline(facts)}",
        "",
        f"{verdict.title.upper()}: {verdict.sentence}",
        f"({confidence(verdict)})",
        "",
        f"First: {advice(facts, verdict, what_if, recommended)}",
    ]
    for section in sections(facts, verdict, what_if, past):
        lines += ["", section.title, *_table(section), *(f"  - {line}" for line in section.lines)]
    return "\n".join(lines)


def _table(section: Section) -> Iterator[str]:
    rows = [section.header, *section.rows] if section.rows else []
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(section.header))]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


# -- data ------------------------------------------------------------------------------------------------------------


def plain(
    facts: Facts,
    verdict: Verdict,
    what_if: WhatIf | None,
    past: Sequence[Scored],
    recommended: Prediction | None,
) -> dict[str, Any]:
    """JSON-able, see `dpex.diagnose.diagnosis.Diagnosis.to_dict`."""
    shown = dict(_plain(verdict))
    shown |= {"title": verdict.title, "is_sure": verdict.is_sure, "shares": dict(verdict.shares)}
    measured = dict(_plain(facts))
    measured |= {"wall_s": facts.wall_s, "wait_s": facts.wait_s}
    measured |= {"lost_ratio": facts.lost_ratio, "stall_ratio": facts.stall_ratio}
    for lane in measured["lanes"].values():
        lane.pop("services_s")
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
