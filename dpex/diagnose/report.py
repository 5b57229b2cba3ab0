"""A diagnosis as text and as plain data. Pure."""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from itertools import zip_longest
from typing import Any, NamedTuple

from dpex.diagnose import hot_calls
from dpex.diagnose.copies import warning
from dpex.diagnose.facts import Facts
from dpex.diagnose.findings import Findings
from dpex.diagnose.verdict import Evidence, Verdict
from dpex.diagnose.what_if import WORTH, Prediction
from dpex.measure.causes import CAUSES, HELD, STEP, TOO_EARLY, Cause
from dpex.measure.pool_reading import PoolReading
from dpex.measure.readable import duration, fine_percent, percent, rounded, size
from dpex.measure.record import as_json
from dpex.measure.settings import INLINE, LOCAL, REMOTE
from dpex.measure.views import cpus_used, mean_s

COLUMNS = 100
"""Maximum width of a line of text, because reports are also read in logs and mails. A narrower terminal reduces it."""
VERSION = 6
"""Version of the layout of `plain`; it grows when something is renamed or removed."""
_NODES = 2
"""Maximum number of failed nodes that the report names. It names the latest."""
_LEFT_OUT = ("batch_waits", "services_s", "full")
"""Fields and properties that `plain` leaves out."""
_SHOWN = 0.01
"""Minimum share of the time for a part to be named in the evidence."""
_SAME = 0.01
"""Maximum relative difference of two step times that the report treats as equal."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading, a table (may be empty) and lines below it."""

    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


class ReportPart(NamedTuple):
    """A part of the wall time: the cause and its name, the share from 0 to 1, and the colour in a bar."""

    cause: str
    name: str
    ratio: float
    colour: str


# -- the screen --------------------------------------------------------------------------------------------------------


def headline(facts: Facts) -> str:
    """Return the loader, the process and the time that the report is about."""
    whose = f"{facts.name or 'loader'} ({facts.dataset or 'dataset'}, batch size {facts.batch_size or 'unknown'})"
    rank = f", rank {facts.rank}" if facts.rank else ""
    epochs = f", {facts.passes} epoch{'s' if facts.passes > 1 else ''}" if facts.passes else ""
    return f"{whose}{rank}: {facts.batches} batches in {facts.wall_s:.1f} s{epochs}"


def confidence(verdict: Verdict) -> str:
    if verdict.cause == "too-early":
        return "too little was measured to conclude anything"
    words = "enough to act on" if verdict.is_sure else "measure again before acting on it"
    return f"confidence {verdict.confidence:.2f} of 1: {words}"


def evidence(facts: Facts, verdict: Verdict) -> Iterator[str]:
    """Return the evidence in lines: batches, streams, CPUs, and the loop's time; or why nothing was measured."""
    if facts.note and not facts.batches:
        yield f"Not measured: {facts.note}."
        return
    if facts.tickets:
        who = f"{facts.workers} worker{'s' * (facts.workers != 1)} made" if facts.workers else "next() made"
        each_s, cpu_s = facts.busy_s / facts.tickets, facts.cpu_s / facts.tickets
        made = f"A batch takes {duration(each_s)} to make, {duration(cpu_s)} of it on a CPU"
        yield f"{made}; {who} {rounded(facts.rate)} batches/s."
        if told := hot_calls.sentence(facts):
            yield told
        if facts.why_streams:
            yield facts.why_streams
        used = ", ".join(f"{name} {count:.2g}" for name, count in cpus_used(facts).items() if count >= 0.05)
        yield f"CPUs in use, of {rounded(facts.cpus)}: {used or 'hardly any'}."
    shown = [f"{part.name} {percent(part.ratio)}" for part in parts(facts, verdict) if part.ratio >= _SHOWN]
    yield f"The loop's time: {', '.join(shown) or 'none'}. ({confidence(verdict)})"


def predicted(one: Prediction, now: Facts | Prediction) -> str:
    """Return a sentence that compares the effect of a change with ``now``, and names the step time if it changes."""
    wait, step_s = (now.wait_ratio, now.step_s) if isinstance(now, Facts) else (now.wait, now.step_s)
    condition = f", if {one.condition}" if one.condition else ""
    is_alike = abs(one.step_s - step_s) <= _SAME * step_s
    steps = "" if is_alike else f", with steps of {duration(one.step_s)} instead of {duration(step_s)}"
    rates = f"{rounded(one.rate)} batches/s ({rounded(one.rate_low)} to {rounded(one.rate_high)})"
    return (
        f"{one.change}: {rates} instead of {rounded(now.rate)}, and a wait of about {_range(one)} instead of "
        f"{percent(wait)}{steps}{condition}."
    )


def _range(one: Prediction) -> str:
    return f"{percent(one.wait)} ({100 * one.low:.0f} to {percent(one.high)})"


def advice(found: Findings) -> str:
    """Return what to do first, with the rate and the wait that it should bring."""
    facts, best = found.facts, found.recommendation
    usual, rate = CAUSES[found.verdict.cause].advice, rounded(facts.rate)
    if found.verdict.cause == TOO_EARLY.key:
        is_hopeless = facts.is_torchs and not facts.batches
        return "None: this loader is not measured, however long training runs." if is_hopeless else usual
    if found.verdict.cause == STEP.key:
        return f"{usual} It takes {rate} batches/s and gets them; the loader cannot add to that."
    told = predicted(best, facts) if best is not None else ""
    if best is not None and found.beyond is not None:
        told += f" Beyond that: {predicted(found.beyond, best)}"
    if found.held_back:
        beyond = f" Beyond the tuner: {told}" if told else ""
        return f"{found.held_back}.{beyond}"
    return told or f"{usual} No change is predicted to make {percent(WORTH)} more than the {rate} batches/s of now."


def text(found: Findings, columns: int = COLUMNS) -> str:
    """Return the report on one screen, wrapped at ``columns``: verdict, evidence, first advice, how to end the stall,
    and failures."""
    facts, verdict = found.facts, found.verdict
    lines = [f"dpex diagnosis of {headline(facts)}", "", f"{verdict.title.upper()}: {verdict.sentence}"]
    told = [part for line in lines for part in wrapped(line, columns)]
    told += listed(evidence(facts, verdict), columns)
    told += ["", *wrapped(f"First: {advice(found)}", columns)]
    if found.end_of_stall:
        told += ["", *wrapped(f"To end the stall: {found.end_of_stall}", columns)]
    for line in failures(facts):
        told += ["", *wrapped(f"Warning: {line}", columns)]
    return "\n".join(told)


def failures(facts: Facts) -> Iterator[str]:
    """Yield lines that matter even if nothing is slow: samples and nodes that failed, and memory that is copied."""
    count = facts.failed_samples
    if count:
        latest = "".join(f" The latest is index {one.shown}: {one.error}" for one in facts.latest_failed[-1:])
        who = "1 sample" if count == 1 else f"{count:,} samples"
        yield f"{who} could not be loaded, and other samples have the places.{latest}"
    for why in facts.failed_nodes[-_NODES:]:
        yield f"{why[:1].upper()}{why[1:]}"
    if told := warning(facts.held, facts.local.running, facts.private_bytes):
        yield told


def full(found: Findings, columns: int = COLUMNS) -> str:
    """Return the report on one screen, followed by all tables."""
    lines = [text(found, columns)]
    for section in sections(found):
        lines += ["", section.title, *table(section, columns), *listed(section.lines, columns)]
    return "\n".join(lines)


def listed(lines: Iterable[str], columns: int = COLUMNS) -> Iterator[str]:
    """Yield lines as a list, wrapped."""
    for line in lines:
        first, *rest = wrapped(line, columns - 4)
        yield f"  - {first}"
        yield from (f"    {more}" for more in rest)


def wrapped(text: str, columns: int = COLUMNS) -> list[str]:
    """Return ``text`` as one or more lines, wrapped at ``columns``; a number and its "%" stay together."""
    lines = textwrap.wrap(text.replace(" %", "\u00a0%"), columns, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\u00a0%", " %") for line in lines] or [""]


def table(section: ReportSection, columns: int = COLUMNS) -> Iterator[str]:
    """Yield the rows of a section as aligned columns, whose cells are wrapped where a row would be too long."""
    rows = [section.header, *section.rows] if section.rows else []
    cells = list(zip(*rows, strict=True))
    widths = [max(1, *map(len, column)) for column in cells]
    least = [max(1, *(len(word) for cell in column for word in wrapped(cell, 1))) for column in cells]
    while sum(widths) + 2 * len(widths) > columns and widths != least:
        _, column = max((width - least[column], column) for column, width in enumerate(widths))
        widths[column] -= 1
    for row in rows:
        for line in zip_longest(*map(wrapped, row, widths), fillvalue=""):
            yield "".join(f"  {cell:{width}}" for cell, width in zip(line, widths, strict=True)).rstrip()


# -- sections ----------------------------------------------------------------------------------------------------------


def sections(found: Findings) -> tuple[ReportSection, ...]:
    """Return the tables that have rows, and the list of missing measurements."""
    facts = found.facts
    evidence = tuple((one.name, measure(one), one.how) for one in found.verdict.evidence)
    how = ReportSection(title="How do we know", header=("what", "measured", "how"), rows=evidence)
    made = [how, _stages(facts), _calls(facts), _slow_samples(facts), _machines(facts.nodes)]
    if found.verdict.cause not in (TOO_EARLY.key, STEP.key):
        made.append(_changes(found.predictions))
    missing = facts.unmeasured or ("nothing that matters here",)
    return (*(one for one in made if one.rows), ReportSection(title="What was not measured", lines=missing))


def measure(one: Evidence) -> str:
    shown = {"ratio": percent, "s": duration, "bytes": size}.get(one.unit)
    return f"{rounded(one.value)} {one.unit}".strip() if shown is None else shown(one.value)


def parts(facts: Facts, verdict: Verdict) -> tuple[ReportPart, ...]:
    """Divide the wall time into the step, its wait for a CPU, and the causes of the wait for data, largest first."""
    held = facts.held_ratio
    step = max(0.0, 1.0 - facts.wait_ratio - held) if facts.wall_s > 0 else 0.0
    waits = [(CAUSES[cause], share * facts.wait_ratio) for cause, share in verdict.shares.items()]
    shares: list[tuple[Cause, float]] = [(STEP, step), *([(HELD, held)] if held else []), *waits]
    return tuple(ReportPart(cause.key, cause.part, share, cause.colour) for cause, share in shares)


_WHERE = {INLINE: "the training process", LOCAL: "this machine", REMOTE: "the cluster"}


def _stages(facts: Facts) -> ReportSection:
    rows = tuple(
        (_WHERE.get(name, name), *row)
        for name, pool in facts.pools.items()
        if pool.tickets
        for row in _stage_rows(pool)
    )
    shared = sum(pool.shared for pool in facts.pools.values())
    told = f"{shared:,} of {facts.tickets:,} batches were made for another training with the same share."
    header = ("batches made in", "stage", "time per batch", "CPU per batch", "share")
    return ReportSection(title="What a batch takes", header=header, rows=rows, lines=(told,) if shared else ())


def _stage_rows(pool: PoolReading) -> Iterator[tuple[str, ...]]:
    total = max(1e-12, pool.busy_s + pool.transit_s)
    stages: tuple[tuple[str, float | None, float | None], ...] = (
        ("load and transform", pool.load_s, pool.load_cpu_s),
        ("collate", pool.collate_s, pool.collate_cpu_s),
        ("encode", pool.encode_s, pool.encode_cpu_s),
        ("transit", pool.transit_s, None),
        ("part of these: waiting for a CPU", pool.queueing_s, None),
    )
    for stage, wall_s, cpu_s in stages:
        if wall_s and wall_s / total >= 0.001:
            cpu = "" if cpu_s is None else duration(cpu_s / pool.tickets)
            yield stage, duration(wall_s / pool.tickets), cpu, fine_percent(wall_s / total)


def _calls(facts: Facts) -> ReportSection:
    rows = tuple(
        (
            "· " * (len(list(one.around)) - 1) + f"{one.name} {one.place}".rstrip(),
            str(one.fact.calls),
            duration(one.wall_s / one.fact.calls),
            duration(one.cpu_s / one.fact.calls),
            fine_percent(one.all_wall_s / max(1e-12, facts.busy_s)),
        )
        for root in hot_calls.trees(facts)
        for one in root.walk()
    )
    header = ("call", "calls timed", "time per call", "CPU per call", "share")
    how = (
        "Timed in some of the batches. A call's time includes the calls below it. Calls of less than 2 % are left out."
    )
    return ReportSection(title="Calls", header=header, rows=rows, lines=(how,))


def _machines(nodes: Mapping[str, PoolReading]) -> ReportSection:
    """Return the table of machines, slowest first."""
    ordered = sorted(nodes.items(), key=lambda node: -mean_s(node[1]))
    return ReportSection(
        title="Slowest machines" if len(ordered) > 1 else "Machines",
        header=("machine", "batches", "time per batch", "CPU per batch", "waiting for a CPU"),
        rows=tuple(_machine(name, node) for name, node in ordered),
        lines=tuple(f"All batches were made on one machine: {name}." for name, _ in ordered if len(ordered) == 1),
    )


def _machine(name: str, node: PoolReading) -> tuple[str, ...]:
    queued_s = node.queueing_s
    seconds = (node.busy_s, node.cpu_s, *(() if queued_s is None else (queued_s,)))
    shown = [duration(each / node.tickets) for each in seconds]
    return (name, str(node.tickets), *shown, *([] if queued_s is not None else [""]))


def _slow_samples(facts: Facts) -> ReportSection:
    mean_s = max(1e-12, facts.sample_s)
    rows = tuple(
        (slow.shown, duration(slow.seconds), f"{slow.seconds / mean_s:.3g}", str(slow.times))
        for slow in facts.slow_samples
        if slow.seconds >= mean_s  # the slowest known are below the mean if others were not timed alone
    )
    header = ("dataset index", "time", "times the mean sample", "how often so slow")
    return ReportSection(title="Slowest samples", header=header, rows=rows, lines=("Since the loader was made.",))


def _changes(predictions: tuple[Prediction, ...]) -> ReportSection:
    rows = tuple(
        (one.change, f"{one.rate:.3g}/s", _range(one), f"if {one.condition}" if one.condition else "")
        for one in predictions
    )
    header = ("change", "batches", "wait (range)", "")
    return ReportSection(title="What would change it", header=header, rows=rows)


# -- data --------------------------------------------------------------------------------------------------------------


def plain(found: Findings) -> dict[str, Any]:
    """Return the findings as data for JSON; see `dpex.diagnose.diagnosis.Diagnosis.to_dict`."""
    hot = hot_calls.hot_calls(found.facts)
    told: dict[str, Any] = as_json({"hot_calls": hot} | _members(found), members=_members, infinite=lambda _: None)
    return {"version": VERSION, **told}


def _members(value: Any) -> dict[str, Any]:
    """Return the public fields and properties of a dataclass by name, except those in `_LEFT_OUT`."""
    names = [field.name for field in fields(value)]
    for kind in type(value).__mro__:
        names += [name for name, one in vars(kind).items() if isinstance(one, (property, cached_property))]
    return {name: getattr(value, name) for name in names if name not in _LEFT_OUT and not name.startswith("_")}
