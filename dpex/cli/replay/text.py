"""A recorded run in plain words: how it went, what was decided and why, and whether it is decided so again. PURE."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.types import Decision, Sample, Settings
from dpex.cli.replay.again import ReplayedWindow
from dpex.cli.replay.reading import Trace
from dpex.measure.readable import duration, fine_percent, rounded, size

_ROWS = 12
"""Lines of the course of a run: it fits on a screen."""
_BAR = 20
"""Characters of a bar: each is 5 %."""
_WIDTH = 116
"""Columns of the text."""
_TIMELINE = "{:>15}  {:>10}  {:>5}  {:20}  {:>7}  {:20}  {}"
_WINDOW = "{:>5} {:>8} {:>7} {:>7} {:>8} {:>5} {:>5} {:>5}  {:>6} {:>6}  {:>7} {:>7}  {:>8} {:>7} {:>7} {:>8}  {}"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A run in figures. seconds: from the first window's beginning to the last one's end; measured_s: in windows.

    wait: share of the measured time lost to loading. last: the settings after the last decision; None if there is no
    window and hence nothing is known.
    """

    seconds: float
    measured_s: float
    windows: int
    batches: int
    wait: float
    decisions: int
    undone: int
    first: Settings
    last: Settings | None


def summary(trace: Trace) -> Summary:
    """The run in figures."""
    samples, decisions = trace.samples, trace.decisions
    lost, measured, total = _times(samples)
    last = samples[-1].settings if samples else None
    final_steps = [step for section in trace.sections for step in section.steps][-1:]
    if final_steps and final_steps[0].decision is not None:
        last = decisions[final_steps[0].decision].new
    return Summary(
        seconds=samples[-1].at - samples[0].at + samples[0].seconds if samples else 0.0,
        measured_s=measured,
        windows=len(samples),
        batches=sum(sample.batches for sample in samples),
        wait=lost / total if total > 0 else 0.0,
        decisions=len(decisions),
        undone=sum(d.outcome is not None and not d.outcome.kept for d in decisions),
        first=trace.sections[0].origin.start,
        last=last,
    )


def _times(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Seconds lost to loading, in windows, and of the consumer."""
    lost = sum(sample.wait_s + sample.own_s for sample in samples)
    return lost, sum(sample.seconds for sample in samples), lost + sum(sample.work_s for sample in samples)


def report(
    trace: Trace, windows: Sequence[ReplayedWindow], changes: Mapping[str, Any], *, every_window: bool = False
) -> Iterator[str]:
    """The lines to show."""
    yield from _head(trace)
    yield from _timeline(windows)
    if every_window:
        yield from _window_table(windows)
    yield from _decisions(trace, windows)
    yield from _verdict(windows, changes)


# -- the run -----------------------------------------------------------------------------------------------------------


def head_facts(trace: Trace) -> Iterator[str]:
    """When, where and by what the run was recorded, and what is known of the process."""
    header, machine = trace.header, trace.header.machine
    where = f" on {machine['name']}" if "name" in machine else ""
    yield f"Recorded {_date(header.started_s)}{where} by dpex {header.dpex}"
    yield from (f"{name.replace('_', ' ')} {value}" for name, value in machine.items() if name != "name")


def _head(trace: Trace) -> Iterator[str]:
    run = summary(trace)
    first, *facts = head_facts(trace)
    yield first
    if facts:
        yield from _wrapped("  process   ", ", ".join(facts))
    if trace.is_torn:
        yield "  note      the last line is incomplete (the run was killed, or the disk was full) and was left out"
    if not run.windows:
        yield "  no window was recorded: the run was too short, or everything was fixed by resize()"
    else:
        rate = run.batches / run.measured_s if run.measured_s else 0.0
        yield f"  run       {run.seconds:.1f} s, {run.measured_s:.1f} s of it measured in {run.windows} windows"
        yield f"  batches   {run.batches}, {rounded(rate)}/s; {fine_percent(run.wait)} of the time was lost to loading"
    for number, section in enumerate(trace.sections):
        origin = section.origin
        at = f" from {section.steps[0].sample.at:.1f} s on" if number and section.steps else ""
        why = f" ({origin.why})" if origin.why else ""
        yield f"  {'renewed ' if number else 'settings'}  {origin.start}{at}{why}"
        said = [*_said(origin.limits), *_not_default(origin.config)]
        if said:
            yield from _wrapped("            given: ", ", ".join(said))
    if run.last is not None and run.last != run.first:
        yield f"  at last   {run.last}"


def _date(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s after 1970"


def _said(limits: Mapping[str, Any]) -> Iterator[str]:
    for name, value in limits.items():
        if isinstance(value, Mapping):
            yield from (f"{name} {inner}={count}" for inner, count in value.items())
        elif value not in (None, False):
            yield f"{name}={value}"


def _not_default(config: AutotuneConfig) -> list[str]:
    default = asdict(AutotuneConfig())
    return [f"{name}={value}" for name, value in asdict(config).items() if value != default[name] and name != "trace"]


def _timeline(windows: Sequence[ReplayedWindow]) -> Iterator[str]:
    """A row for each twelfth of the run; fewer rows where windows are longer than that."""
    if not windows:
        return
    start = windows[0].sample.at - windows[0].sample.seconds
    span, longest = windows[-1].sample.at - start, max(window.sample.seconds for window in windows)
    count = max(1, min(_ROWS, int(span / longest) if longest > 0 else 1))
    width = max(1e-9, span / count)
    most = max(1, *(_running(window.sample) for window in windows))
    numbers = {w.number: n for n, w in enumerate((w for w in windows if w.recorded), 1)}
    yield ""
    yield _TIMELINE.format("seconds", "batches/s", "lost", "", "workers", "", "decisions").rstrip()
    rows: dict[int, list[ReplayedWindow]] = {}
    for window in windows:
        rows.setdefault(min(count - 1, int((window.sample.at - start) / width)), []).append(window)
    for row, inside in sorted(rows.items()):
        samples = [window.sample for window in inside]
        lost, measured, total = _times(samples)
        wait = lost / total if total > 0 else 0.0
        workers = sum(map(_running, samples)) / len(samples)
        yield _TIMELINE.format(
            f"{start + row * width:.1f} - {start + (row + 1) * width:.1f}",
            f"{sum(s.batches for s in samples) / measured:.3g}" if measured else "",
            fine_percent(wait),
            "#" * round(_BAR * min(1.0, wait)),
            f"{workers:.1f}",
            "=" * round(_BAR * workers / most),
            " ".join(f"[{numbers[window.number]}]" for window in inside if window.number in numbers),
        ).rstrip()


def _running(sample: Sample) -> int:
    return sample.local.running + sample.remote.running


def _window_table(windows: Sequence[ReplayedWindow]) -> Iterator[str]:
    heads = ("#", "at", "length", "batches", "rate", "wait", "own", "work", "ready", "flight")
    pools = ("local", "remote", "busy", "CPU", "others", "free", "settings")
    yield ""
    yield _WINDOW.format(*heads, *pools)
    for window in windows:
        sample, machine = window.sample, window.sample.machine
        pools_of = (sample.local, sample.remote)
        tickets = sum(pool.tickets for pool in pools_of)
        times = (sum(pool.busy_s for pool in pools_of), sum(pool.cpu_s for pool in pools_of))
        busy, cpu = (duration(each / tickets) if tickets else "" for each in times)
        total = sample.wait_s + sample.own_s + sample.work_s
        shares = (fine_percent(each / total) if total else "" for each in (sample.wait_s, sample.own_s, sample.work_s))
        yield _WINDOW.format(
            window.number,
            f"{sample.at:.2f} s",
            f"{sample.seconds:.2f} s",
            sample.batches,
            f"{sample.rate:.3g}/s",
            *shares,
            sample.ready,
            sample.in_flight,
            *(f"{pool.running}/{pool.requested}" for pool in (sample.local, sample.remote)),
            busy,
            cpu,
            f"{machine.others:.2f}",
            "" if machine.memory_free is None else size(machine.memory_free),
            f"{sample.settings}{' *' if window.recorded else ''}",
        )
    yield "      pools: running/requested; busy and CPU: of a batch in its worker; others: CPUs; *: decided after it"


# -- decisions ---------------------------------------------------------------------------------------------------------


def _decisions(trace: Trace, windows: Sequence[ReplayedWindow]) -> Iterator[str]:
    yield ""
    decided = [window for window in windows if window.recorded is not None]
    yield f"Decisions: {len(decided) or 'none'}"
    for number, window in enumerate(decided, 1):
        if window.recorded is not None:
            yield from _explain(number, window, window.recorded)


def _explain(number: int, window: ReplayedWindow, decision: Decision) -> Iterator[str]:
    yield ""
    yield f"[{number}] at {decision.at:.2f} s: {decision.old} -> {decision.new} ({decision.reason})"
    yield from _wrapped("    why       ", decision.text)
    if decision.evidence:
        yield from _wrapped("    evidence  ", ", ".join(quantity(*pair) for pair in decision.evidence.items()))
    yield f"    expected  {rounded(decision.predicted_rate)}/s, {fine_percent(decision.predicted_wait)} lost to loading"
    outcome = decision.outcome
    if outcome is None:
        yield "    measured  never: the run ended, or something else was decided or fixed first"
    else:
        verdict = "kept" if outcome.kept else "undone"
        after = f"{outcome.at - decision.at:.1f} s later"
        measured = f"{rounded(outcome.rate)}/s, {fine_percent(outcome.wait)} lost to loading"
        yield f"    measured  {measured}, {after}: {verdict}"
    yield f"    replayed  {'the same' if window.is_same else _short(window.replayed)}"


def _short(decision: Decision | None) -> str:
    return "nothing" if decision is None else f"{decision.old} -> {decision.new} ({decision.reason})"


def _wrapped(label: str, text: str) -> list[str]:
    return textwrap.wrap(label + text, _WIDTH, subsequent_indent=" " * len(label), break_on_hyphens=False)


def quantity(name: str, value: float) -> str:
    """A number of the evidence with its unit, which its name tells."""
    for ending, show in _UNITS.items():
        if name.endswith(ending):
            return f"{name.removesuffix(ending).replace('_', ' ')} {show(value)}"
    label = name.replace("_", " ")
    if "rate" in name:
        return f"{label} {rounded(value)}/s"
    if "wait" in name:
        return f"{label} {fine_percent(value)}"
    return f"{label} {value:.4g}"


_UNITS: Mapping[str, Callable[[float], str]] = {
    "_ms": lambda value: duration(1e-3 * value),
    "_s": duration,
    "_bytes": size,
    "_free": lambda value: f"free {size(value)}",
    "_share": fine_percent,
    "_ratio": fine_percent,
}


# -- the same again? ---------------------------------------------------------------------------------------------------


def _verdict(windows: Sequence[ReplayedWindow], changes: Mapping[str, Any]) -> Iterator[str]:
    who = "This version of dpex"
    if changes:
        who += f" with {', '.join(f'{name}={value}' for name, value in changes.items())}"
    different = [window for window in windows if not window.is_same]
    yield ""
    if not different:
        yield f"{who} decides the same on these windows."
        return
    first = different[0]
    yield f"{who} decides otherwise. The first difference is after window {first.number}, at {first.sample.at:.2f} s:"
    yield f"    recorded  {_short(first.recorded)}"
    yield f"    replayed  {_short(first.replayed)}"
    if first.replayed is not None:
        yield from _wrapped("    why       ", first.replayed.text)
    later = [window for window in windows if window.number > first.number and (window.recorded or window.replayed)]
    yield ""
    yield "All later windows were recorded under the recorded settings, not under those that are decided now. What is"
    yield "decided on them shows what the law tends to, not what would have happened; only a new run shows it."
    if later:
        yield ""
    for window in later:
        yield f"    {window.sample.at:8.2f} s  recorded  {_short(window.recorded)}"
        yield f"    {'':8}    replayed  {_short(window.replayed)}"
