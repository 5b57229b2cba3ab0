"""Results of the rows of "auto" as text for a terminal, as a Markdown table and as JSON."""

from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from benchmarks.loaders import Contestant
from benchmarks.oracle import AUTO, AutoResult, Verdict
from benchmarks.report import per_second
from benchmarks.spread import Spread

MET = {True: "met", False: "NOT MET", None: "not asked, as no fixed count of dpex is ahead of it"}


def text(result: AutoResult) -> str:
    """A row for the terminal: what was screened, every contestant, how "auto" got there, and the targets."""
    lines = [f'{result.row.title}; num_workers="auto"', *_screening(result)]
    lines += [_measured(result, contestant) for contestant in result.courses]
    lines += _learning(result)
    lines += [_judged(result, verdict) for verdict in result.verdicts]
    lines += [f"    not measured: {c.label}: {why.splitlines()[-1]}" for c, why in result.failed.items() if why]
    return "\n".join(lines)


def _screening(result: AutoResult) -> list[str]:
    if not result.screened:
        return []
    lines = ["    short look at fixed counts, batches per second; those in [] are measured at full length"]
    for engine in ("torch", "dpex"):
        found = [_looked_at(result, c) for c in result.screened if c.engine == engine]
        lines.append(f"        {engine:<6}" + "  ".join(found))
    return lines


def _looked_at(result: AutoResult, contestant: Contestant) -> str:
    shown = f"{contestant.workers}: {per_second(result.screened[contestant])}"
    return f"[{shown}]" if contestant in result.courses else shown


def _measured(result: AutoResult, contestant: Contestant) -> str:
    rate = result.rate(contestant)
    shown = f"    {contestant.label:<34}{per_second(rate.median):>14}"
    if len(result.courses[contestant]) > 1:
        shown += f"  ({per_second(rate.low)} to {per_second(rate.high)})"
    return shown + (f"  stall {result.stall(contestant):.1%}" if result.row.step_s else "")


def _learning(result: AutoResult) -> list[str]:
    """How each run of "auto" went."""
    lines = []
    for course in result.courses[AUTO]:
        made = f"{len(course.decisions)} decision{'' if len(course.decisions) == 1 else 's'}"
        settled = f"settled at {per_second(course.settled_rate)} after {course.settled_after_s:.1f} s; "
        lines.append(f"    auto: {'' if result.row.counted else settled}{made}; at the end {course.settings}")
    return lines


def _judged(result: AutoResult, verdict: Verdict) -> str:
    name = {"oracle": "oracle: ", "usual": "cores: ", "torch": "torch's best: "}[verdict.target.against]
    figures = _figures(verdict)
    return f"    {name + verdict.other.label:<34}{figures}; target {_target(result, verdict)}: {MET[verdict.met]}"


def _target(result: AutoResult, verdict: Verdict) -> str:
    """The target as far as it can be asked of the row."""
    return str(verdict.target if result.row.step_s else verdict.target.rate)


def _figures(verdict: Verdict) -> str:
    shown = _with_range(verdict.ratio, verdict.target.rate.show)
    stall = verdict.target.or_stall
    if stall is None or verdict.extra_points is None:
        return f"{shown:>14}"
    return f"{shown:>14}, stall {_with_range(verdict.extra_points, stall.show)}"


def _with_range(spread: Spread, show: Callable[[float], str]) -> str:
    if spread.low == spread.high:
        return show(spread.median)
    return f"{show(spread.median)} ({show(spread.low)} to {show(spread.high)})"


def markdown(results: list[AutoResult]) -> str:
    """A Markdown table: median rates (workers), then "auto" beside three of them."""
    lines = [
        "| work | torch, usual | torch, best | dpex fixed, best | auto | the oracle | torch, usual | torch, best |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for result in results:
        judged = {verdict.target.against: verdict for verdict in result.verdicts}
        others = (judged["usual"].other if "usual" in judged else None, result.best("torch"), result.best("dpex"))
        cells = [_cell(result, contestant) for contestant in (*others, AUTO)]
        cells += [_verdict_cell(judged.get(against)) for against in ("oracle", "usual", "torch")]
        lines.append(f"| {' | '.join([result.row.title, *cells])} |")
    return "\n".join(lines)


def _cell(result: AutoResult, contestant: Contestant | None) -> str:
    if contestant is None:
        return "not measured"
    workers = "" if contestant == AUTO else f" ({contestant.workers})"
    stall = f", stall {result.stall(contestant):.0%}" if result.row.step_s else ""
    return f"{per_second(result.rate(contestant).median)}{workers}{stall}"


def _verdict_cell(verdict: Verdict | None) -> str:
    if verdict is None:
        return "not measured"
    ending = {True: "", False: ", not met", None: ", not asked"}[verdict.met]
    return f"**{_figures(verdict).strip()}**{ending}"


def as_json(result: AutoResult) -> dict[str, Any]:
    """A row with every course: batches, seconds, and the decisions of "auto"."""
    return {
        "key": result.row.key,
        "title": result.row.title,
        "quantity": "course",
        "step_s": result.row.step_s,
        "screened": [{**c.as_dict(), "rate": rate} for c, rate in result.screened.items()],
        "failed": [{**c.as_dict(), "why": why} for c, why in result.failed.items()],
        "contestants": [_contestant(result, c) for c in result.courses],
        "verdicts": [_verdict(verdict) for verdict in result.verdicts],
    }


def _contestant(result: AutoResult, contestant: Contestant) -> dict[str, Any]:
    return {
        "label": contestant.label,
        **contestant.as_dict(),
        **asdict(result.rate(contestant)),
        "stall": result.stall(contestant),
        "courses": [
            {**course.as_dict(), "settled_rate": course.settled_rate, "settled_after_s": course.settled_after_s}
            for course in result.courses[contestant]
        ],
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    return {
        "against": verdict.target.against,
        "label": verdict.other.label,
        "target": asdict(verdict.target),
        "ratio": asdict(verdict.ratio),
        "extra_points": asdict(verdict.extra_points) if verdict.extra_points else None,
        "met": verdict.met,
    }
