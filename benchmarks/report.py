"""Results as text for a terminal, as a Markdown table and as JSON."""

from dataclasses import asdict
from typing import Any

from benchmarks.loaders import Contestant
from benchmarks.runner import Result
from benchmarks.spread import Spread


def _value(result: Result, value: float) -> str:
    if result.row.quantity == "first-batch":
        return f"{1000 * value:,.1f} ms"
    return per_second(value)


def per_second(rate: float) -> str:
    """A rate for people."""
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:,.1f}/s"


def _range(result: Result, spread: Spread) -> str:
    return f"({_value(result, spread.low)} to {_value(result, spread.high)})"


def text(result: Result) -> str:
    """A row for the terminal: every contestant, then the comparison and whether the target was met."""
    lines = [result.row.title]
    for contestant in result.samples:
        spread = result.spread(contestant)
        lines.append(f"    {contestant.label:<34}{_value(result, spread.median):>14}  {_range(result, spread)}")
    target, comparison = result.row.target, result.comparison
    show = target.show
    lines.append(
        f"    {'against ' + result.theirs.label:<34}{show(comparison.median):>14}  "
        f"({show(comparison.low)} to {show(comparison.high)}); "
        f"target {target}: {'met' if result.met else 'NOT MET'}"
    )
    if result.limit_ratio is not None:
        lines.append(f"    {'share of the limit':<34}{result.limit_ratio:>14.2f}")
    return "\n".join(lines)


def markdown(results: list[Result]) -> str:
    """The comparison as a Markdown table: medians, with the lowest and highest round of the ratio."""
    lines = ["| work | the other | dpex | dpex beside it | target |", "|---|---|---|---|---|"]
    for result in results:
        ours, theirs, comparison = result.ours, result.theirs, result.comparison
        show = result.row.target.show
        cells = (
            result.row.title,
            f"{_value(result, result.spread(theirs).median)} ({theirs.label})",
            _value(result, result.spread(ours).median),
            f"**{show(comparison.median)}** ({show(comparison.low)} to {show(comparison.high)})",
            f"{result.row.target}{'' if result.met else ', not met'}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def as_json(result: Result) -> dict[str, Any]:
    """A row with every value measured: batches per second, or seconds; extra time in milliseconds."""
    return {
        "key": result.row.key,
        "title": result.row.title,
        "quantity": result.row.quantity,
        "contestants": [_contestant(result, c) for c in result.samples],
        "against": result.theirs.label,
        "comparison": asdict(result.comparison),
        "limit_ratio": result.limit_ratio,
        "target": asdict(result.row.target),
        "met": result.met,
    }


def _contestant(result: Result, contestant: Contestant) -> dict[str, Any]:
    return {
        "label": contestant.label,
        **contestant.as_dict(),
        **asdict(result.spread(contestant)),
        "samples": result.samples[contestant],
    }
