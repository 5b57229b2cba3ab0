"""Cells and lines of the tables: rates, ratios with their ranges, and which line says that dpex is behind."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.contestants import Contestant
from benchmarks.results import Part, RowResult, Spread

NOTHING = "-"
NOT_MEASURED = "Not measured yet."


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a table, and whether dpex is behind something in it."""

    cells: tuple[str, ...]
    behind: bool


def shown_rate(result: RowResult, rate: float) -> str:
    """Show a rate, or the time to the first batch in rows that measure it."""
    if result.row.kind == "start":
        return f"{1000 / rate:,.0f} ms"
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:,.1f}/s"


def shown_ratio(spread: Spread | None) -> str:
    """Median and range."""
    if spread is None:
        return NOTHING
    return f"{spread.median:.2f}x ({spread.low:.2f} to {spread.high:.2f})"


def rate_cell(result: RowResult, contestant: Contestant | None, *, count: bool = True, part: Part = "whole") -> str:
    """Show the rate and the setting of a contestant, and under a step the share of time spent waiting."""
    if contestant is None:
        return NOTHING
    shown = shown_rate(result, result.rate(contestant, part).median)
    prefetch = f", prefetch {contestant.prefetch}" if contestant.prefetch else ""
    waiting = f", waiting {result.waiting(contestant).median:.0%}" if result.row.step_s else ""
    return shown + (f" ({contestant.workers}{prefetch})" if count else "") + waiting


def ratio_cells(*ratios: Spread | None) -> list[str]:
    """Each ratio with its range."""
    return [shown_ratio(one) for one in ratios]


def named_cell(result: RowResult, contestant: Contestant | None, part: Part = "whole") -> str:
    """Show a rate with the name of its contestant."""
    return f"{rate_cell(result, contestant, count=False, part=part)}, {contestant.label}" if contestant else NOTHING


def table(header: Sequence[str], lines: Iterable[Line]) -> str:
    """A Markdown table; lines where dpex is behind come first, and say so."""
    ordered = sorted(lines, key=lambda line: not line.behind)
    cells = [header, ["---"] * len(header), *(line.cells for line in ordered)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)
