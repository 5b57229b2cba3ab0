"""A diagnosis as text, as plain data, and as an HTML page that loads nothing. Pure; the page escapes all text."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from html import escape
from typing import TYPE_CHECKING, Any, NamedTuple

from dpex.diagnose import hot_calls, work
from dpex.diagnose.causes import CAUSES, HELD, STEP, TOO_EARLY, Cause
from dpex.diagnose.copies import warning
from dpex.diagnose.facts import Facts, queueing_s
from dpex.diagnose.verdict import Evidence, Verdict
from dpex.diagnose.what_if import WORTH, Prediction
from dpex.measure.pool_reading import PoolReading
from dpex.measure.readable import duration, fine_percent, percent, rounded, size
from dpex.measure.settings import INLINE, LOCAL, REMOTE

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis

COLUMNS = 100
"""Lines of the text are wrapped at this width, or at that of a narrower terminal: a report is read in logs and mails,
too."""
_LAST_COLUMN = 16
"""The last column of a table is wrapped, but not more narrowly than this."""
VERSION = 6
"""Version of the layout of `plain`; it grows when something is renamed or removed."""
_NODES = 2
"""Nodes that failed, on the screen; the full report has them all."""
_CALCULATED = ("wall_s", "wait_s", "wait_ratio", "held_ratio", "gpu_stall_ratio", "others", "calls", "unmeasured")
"""Properties of `Facts` that `plain` has beside the counts."""
_SHOWN = 0.01
"""A part of the time below this is left out of the evidence."""
_SAME = 0.01
"""Relative difference of two times of a step that is not told."""


@dataclass(frozen=True, kw_only=True)
class ReportSection:
    """A heading, a table (may be empty) and lines below it."""

    title: str
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    lines: tuple[str, ...] = ()


class ReportPart(NamedTuple):
    """A share of wall time, 0 to 1: what for, in words, and its colour in a bar."""

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
        used = ", ".join(f"{name} {count:.2g}" for name, count in work.cpus_used(facts).items() if count >= 0.05)
        yield f"CPUs in use, of {rounded(facts.cpus)}: {used or 'hardly any'}."
    shown = [f"{part.name} {percent(part.ratio)}" for part in parts(facts, verdict) if part.ratio >= _SHOWN]
    yield f"The loop's time: {', '.join(shown) or 'none'}. ({confidence(verdict)})"


def predicted(one: Prediction, now: Facts | Prediction) -> str:
    """Return a change with its effect, compared with ``now``. It names the step if its time changes."""
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


def advice(found: Diagnosis) -> str:
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


def text(found: Diagnosis, columns: int = COLUMNS) -> str:
    """Return the report on one screen, in lines of that width: verdict, evidence, first advice, the end of the stall,
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
    """Yield lines that matter even where nothing is slow: samples and nodes that failed, memory that is copied."""
    count = facts.failed_samples
    if count:
        latest = "".join(f" The latest is index {one.shown}: {one.error}" for one in facts.latest_failed[-1:])
        who = "1 sample" if count == 1 else f"{count:,} samples"
        yield f"{who} could not be loaded, and other samples have the places.{latest}"
    for why in facts.failed_nodes[-_NODES:]:
        yield f"{why[:1].upper()}{why[1:]}"
    if told := warning(facts.held, facts.local.running, facts.private_bytes):
        yield told


def full(found: Diagnosis, columns: int = COLUMNS) -> str:
    """The screen, and all tables below it."""
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
    """Lines of that width, at least one; a number and its "%" stay together."""
    lines = textwrap.wrap(text.replace(" %", "\u00a0%"), columns, break_on_hyphens=False, break_long_words=False)
    return [line.replace("\u00a0%", " %") for line in lines] or [""]


def table(section: ReportSection, columns: int = COLUMNS) -> Iterator[str]:
    """Yield the rows of a section as aligned columns."""
    rows = [section.header, *section.rows] if section.rows else []
    if not rows:
        return
    widths = [max(len(row[column]) for row in rows) for column in range(len(section.header))]
    last_at = 2 + sum(width + 2 for width in widths[:-1])
    for row in rows:
        begin = (
            "  " + "".join(cell.ljust(width) + "  " for cell, width in zip(row, widths, strict=False))[: last_at - 2]
        )
        last, *rest = wrapped(row[-1], max(_LAST_COLUMN, columns - last_at))
        yield (begin + last).rstrip()
        yield from (" " * last_at + line for line in rest)


# -- sections ----------------------------------------------------------------------------------------------------------


def sections(found: Diagnosis) -> tuple[ReportSection, ...]:
    """The tables that have rows."""
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
    """Divide the wall time: the step, what holds it up, then the wait, largest first."""
    held = facts.held_ratio
    step = max(0.0, 1.0 - facts.wait_ratio - held) if facts.wall_s > 0 else 0.0
    waits = [(CAUSES[cause], share * facts.wait_ratio) for cause, share in verdict.shares]
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
        ("part of these: waiting for a CPU", queueing_s(pool), None),
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
        "Timed in some of the batches. A call's time includes the calls below it; those of less than 2 % are left out."
    )
    return ReportSection(title="Calls", header=header, rows=rows, lines=(how,))


def _machines(nodes: Mapping[str, PoolReading]) -> ReportSection:
    """Slowest first."""
    ordered = sorted(nodes.items(), key=lambda node: -node[1].busy_s / node[1].tickets)
    return ReportSection(
        title="Slowest machines" if len(ordered) > 1 else "Machines",
        header=("machine", "batches", "time per batch", "CPU per batch", "waiting for a CPU"),
        rows=tuple(_machine(name, node) for name, node in ordered),
        lines=tuple(f"All batches were made on one machine: {name}." for name, _ in ordered if len(ordered) == 1),
    )


def _machine(name: str, node: PoolReading) -> tuple[str, ...]:
    queued_s = queueing_s(node)
    seconds = (node.busy_s, node.cpu_s, *(() if queued_s is None else (queued_s,)))
    shown = [duration(each / node.tickets) for each in seconds]
    return (name, str(node.tickets), *shown, *([] if queued_s is not None else [""]))


def _slow_samples(facts: Facts) -> ReportSection:
    mean_s = max(1e-12, facts.sample_s)
    rows = tuple(
        (slow.shown, duration(slow.seconds), f"{slow.seconds / mean_s:.3g}", str(slow.times))
        for slow in facts.slow_samples
        if slow.seconds >= mean_s  # else slower ones were not timed alone
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


def plain(found: Diagnosis) -> dict[str, Any]:
    """JSON-able, see `dpex.diagnose.diagnosis.Diagnosis.to_dict`."""
    facts, verdict = found.facts, found.verdict
    shown = {"title": verdict.title, "is_sure": verdict.is_sure, **_plain(verdict), "shares": dict(verdict.shares)}
    measured = _plain(facts)
    del measured["batch_waits"]
    measured |= {name: _plain(getattr(facts, name)) for name in _CALCULATED}
    for pool in measured["pools"].values():
        pool.pop("services_s")
    return {
        "version": VERSION,
        "verdict": shown,
        "advice": advice(found),
        "held_back": found.held_back,
        "end_of_stall": found.end_of_stall,
        "hot_calls": _plain(hot_calls.hot_calls(facts)),
        "recommendation": _plain(found.recommendation),
        "beyond": _plain(found.beyond),
        "predictions": _plain(found.predictions),
        "facts": measured,
    }


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        value = {field.name: getattr(value, field.name) for field in fields(value)}
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


# -- a page ------------------------------------------------------------------------------------------------------------

_STYLE = """
.dpex-diagnosis {
  max-width: 60rem; margin: auto;
  h1 { font-size: 1.3rem; } h1::first-letter { text-transform: uppercase; } h2 { font-size: 1.05rem; }
  .faint, th, li { opacity: .7; } .first { background: rgb(128 128 128 / .12); padding: .75rem 1rem; }
  .scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; }
  th, td { text-align: left !important; padding: .3rem .8rem .3rem 0; border-bottom: 1px solid rgb(128 128 128 / .3); }
  th { font-weight: 500; } td { white-space: nowrap; vertical-align: top; }
  td:first-child, td:last-child { white-space: normal; overflow-wrap: anywhere; min-width: 8rem; }
  .bar { display: flex; height: 1.4rem; } .bar span { min-width: 2px; } .key { margin: .3rem 0; }
  .key span { display: inline-block; margin-right: 1rem; font-size: .85rem; }
  .key i { display: inline-block; width: .8rem; height: .8rem; margin-right: .3rem; }
  .bar, .key i { print-color-adjust: exact; }
}
"""
"""Colours are those of the page or of the notebook around it, light or dark."""


def page(found: Diagnosis, last: Sequence[str] = ()) -> str:
    """Return the report as a page; ``last`` are lines for its end."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>dpex: {escape(found.verdict.title)}</title>\n<style>:root {{ color-scheme: light dark; }} "
        "body { margin: 2rem 1rem; font: 16px/1.5 system-ui, sans-serif; }</style>\n</head>\n"
        f"<body>\n{_article(found, _tables(found), last)}\n</body>\n</html>\n"
    )


def fragment(found: Diagnosis) -> str:
    """Return the report for a notebook, with its tables folded."""
    return _article(found, f"<details><summary>All tables</summary>\n{_tables(found)}\n</details>")


def _article(found: Diagnosis, tables: str, last: Sequence[str] = ()) -> str:
    end = "".join(f"<p>{escape(line)}</p>\n" for line in last)
    return f'<div class="dpex-diagnosis">\n<style>{_STYLE}</style>\n{_summary(found)}\n{tables}\n{end}</div>'


def _tables(found: Diagnosis) -> str:
    return "\n".join(map(_html_section, sections(found)))


def _summary(found: Diagnosis) -> str:
    """The verdict, the advice and the wall time as a bar."""
    facts, verdict = found.facts, found.verdict
    end = [f'<p class="end"><strong>To end the stall:</strong> {escape(found.end_of_stall)}</p>']
    lines = [
        f"<h1>{escape(verdict.title)}</h1>",
        f"<p>{escape(verdict.sentence)}</p>",
        f'<p class="faint">{escape(headline(facts))}; {escape(confidence(verdict))} {escape(facts.why_streams)}</p>',
        f'<p class="first"><strong>First:</strong> {escape(advice(found))}</p>',
        *(f"<p>{escape(line)}</p>" for line in [hot_calls.sentence(facts)] if line),
        *(end if found.end_of_stall else ()),
        *(f'<p class="warning"><strong>Warning:</strong> {escape(line)}</p>' for line in failures(facts)),
        _bar(facts, verdict),
    ]
    return "\n".join(lines)


def _bar(facts: Facts, verdict: Verdict) -> str:
    shown = [part for part in parts(facts, verdict) if part.ratio >= 0.005]
    if not shown:
        return ""
    bar = "".join(f'<span style="flex: {part.ratio:.4f}; background: {part.colour}"></span>' for part in shown)
    key = "".join(
        f'<span><i style="background: {part.colour}"></i>{escape(part.name)} {percent(part.ratio)}</span>'
        for part in shown
    )
    described = ", ".join(f"{part.name} {percent(part.ratio)}" for part in shown)
    return f'<div class="bar" role="img" aria-label="{escape(described)}">{bar}</div>\n<div class="key">{key}</div>'


def _html_section(section: ReportSection) -> str:
    lines = [f"<h2>{escape(section.title)}</h2>"]
    if section.rows:
        lines += ['<div class="scroll"><table>', _html_row("th", section.header)]
        lines += [_html_row("td", row) for row in section.rows]
        lines.append("</table></div>")
    if section.lines:
        lines.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in section.lines) + "</ul>")
    return "\n".join(lines)


def _html_row(cell: str, values: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(value)}</{cell}>" for value in values) + "</tr>"
