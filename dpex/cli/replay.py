"""``dpex replay``: a recorded run as text, its decisions explained, and decided again."""

from __future__ import annotations

import argparse
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import datetime, timezone
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.types import Decision, Sample, Settings
from dpex.cli import common
from dpex.cli.recorded_run import ReplayedWindow, Trace, load, parse_changes, replay
from dpex.errors import OptionError, TraceError
from dpex.measure.readable import fine_percent, rounded

_DESCRIPTION = """
Explain a recorded run as text: its course, the decisions with their reasons and outcomes, and whether this version of
dpex makes the same decisions on its windows.
"""
_EPILOG = """\
exit status:
  0  this version of dpex makes the same decisions
  1  it makes others
  2  the trace or an option cannot be used

examples:
  DPEX_TRACE=run-{rank}.jsonl python train.py
  dpex replay run-0.jsonl
  dpex replay run-0.jsonl --set max_local=4
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    summary_line = "explain a recorded run, and decide it again"
    parser = common.add(subparsers, "replay", summary=summary_line, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("trace", metavar="TRACE", help="a file written by AutotuneConfig(trace=...) or DPEX_TRACE")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="try another configuration")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, write: Callable[[str], object] = print) -> int:
    """Print the report; returns the exit status that the help lists."""
    try:
        changes = parse_changes(options.set)
        trace = load(options.trace)
        windows = replay(trace, changes)
    except (TraceError, OptionError) as error:
        print(f"dpex replay: {error}", file=sys.stderr)
        return 2
    for line in report(trace, windows, changes):
        write(line)
    return int(not all(window.is_same for window in windows))


# -- the report --------------------------------------------------------------------------------------------------------

_ROWS = 12
"""Lines of the course of a run: it fits on a screen."""
_BAR = 20
"""Characters of a bar: each is 5 %."""
_WIDTH = 116
"""Columns of the text."""
_TIMELINE = "{:>15}  {:>10}  {:>5}  {:20}  {:>7}  {:20}  {}"


def _times(samples: Sequence[Sample]) -> tuple[float, float, float]:
    """Seconds lost to loading, in windows, and of the consumer."""
    lost = sum(sample.wait_s + sample.own_s for sample in samples)
    return lost, sum(sample.seconds for sample in samples), lost + sum(sample.work_s for sample in samples)


def report(trace: Trace, windows: Sequence[ReplayedWindow], changes: Mapping[str, Any]) -> Iterator[str]:
    """Return the lines to show."""
    yield from _head(trace)
    yield from _timeline(windows)
    yield from _decisions(windows)
    yield from _verdict(windows, changes)


# -- the run -----------------------------------------------------------------------------------------------------------


def _head(trace: Trace) -> Iterator[str]:
    """When, where and by what the run was recorded, how long it was, and its settings."""
    header, machine, samples = trace.header, trace.header.machine, trace.samples
    where = f" on {machine['name']}" if "name" in machine else ""
    yield f"Recorded {_date(header.started_s)}{where} by dpex {header.dpex}"
    facts = ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in machine.items() if name != "name")
    yield from _wrapped("  process   ", facts) if facts else ()
    if trace.is_torn:
        yield "  note      the last line is incomplete (the run was killed, or the disk was full) and was left out"
    if not samples:
        yield "  no window was recorded: the run was too short, or everything was fixed by resize()"
    else:
        lost_s, measured_s, total_s = _times(samples)
        seconds = samples[-1].at - samples[0].at + samples[0].seconds
        batches, wait = sum(sample.batches for sample in samples), lost_s / total_s if total_s > 0 else 0.0
        rate = batches / measured_s if measured_s else 0.0
        yield f"  run       {seconds:.1f} s, {measured_s:.1f} s of it measured in {len(samples)} windows"
        yield f"  batches   {batches}, {rounded(rate)}/s; {fine_percent(wait)} of the time was lost to loading"
    for number, section in enumerate(trace.sections):
        origin = section.origin
        at = f" from {section.steps[0].sample.at:.1f} s on" if number and section.steps else ""
        why = f" ({origin.why})" if origin.why else ""
        yield f"  {'renewed ' if number else 'settings'}  {origin.start}{at}{why}"
        given = [*_limits(origin.limits), *_not_default(origin.config)]
        yield from _wrapped("            given: ", ", ".join(given)) if given else ()
    last = _last_settings(trace)
    if last != trace.sections[0].origin.start:
        yield f"  at last   {last}"


def _last_settings(trace: Trace) -> Settings:
    """The settings after the last decision."""
    steps = [step for section in trace.sections for step in section.steps]
    if not steps:
        return trace.sections[0].origin.start
    decision = steps[-1].decision
    return steps[-1].sample.settings if decision is None else trace.decisions[decision].new


def _date(seconds: float) -> str:
    try:
        return f"{datetime.fromtimestamp(seconds, timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
    except (OverflowError, OSError, ValueError):
        return f"{seconds:g} s after 1970"


def _limits(limits: Mapping[str, Any]) -> Iterator[str]:
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


# -- decisions ---------------------------------------------------------------------------------------------------------


def _decisions(windows: Sequence[ReplayedWindow]) -> Iterator[str]:
    decided = [(window, window.recorded) for window in windows if window.recorded is not None]
    yield ""
    yield f"Decisions: {len(decided) or 'none'}"
    for number, (window, decision) in enumerate(decided, 1):
        yield from _explain(number, window, decision)


def _explain(number: int, window: ReplayedWindow, decision: Decision) -> Iterator[str]:
    yield ""
    yield f"[{number}] at {decision.at:.2f} s: {decision.old} -> {decision.new} ({decision.reason})"
    yield from _wrapped("    why       ", decision.text)
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
    yield ""
    yield "All later windows were recorded under the recorded settings, not under those that would be in force now."
    yield "Only a new run shows what would have happened."
