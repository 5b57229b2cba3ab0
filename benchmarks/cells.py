"""Cells of the tables of a run: rates, ratios and what they are taken of. Pure."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from benchmarks.contestants import AUTO, Contestant
from benchmarks.results import Part, RowResult, Seeding
from benchmarks.spread import Spread

NOTHING = "-"


@dataclass(frozen=True, kw_only=True)
class Line:
    """A line of a table, and whether dpex is behind something in it."""

    cells: tuple[str, ...]
    behind: bool


def shown_rate(result: RowResult, rate: float) -> str:
    """A rate for people; of the time to the first batch, that time."""
    if result.row.kind == "start":
        return f"{1000 / rate:,.0f} ms"
    return f"{rate:,.0f}/s" if rate >= 100 else f"{rate:,.1f}/s"


def shown_ratio(spread: Spread | None) -> str:
    """Median and range."""
    if spread is None:
        return NOTHING
    return f"{spread.median:.2f}x ({spread.low:.2f} to {spread.high:.2f})"


def rate_cell(result: RowResult, contestant: Contestant | None, *, count: bool = True, part: Part = "whole") -> str:
    """Somebody's rate and setting, and what the loop waited where it has a step."""
    if contestant is None:
        return NOTHING
    shown = shown_rate(result, result.rate(contestant, part).median)
    prefetch = f", prefetch {contestant.prefetch}" if contestant.prefetch else ""
    waiting = f", waiting {result.waiting(contestant):.0%}" if result.row.step_s else ""
    return shown + (f" ({contestant.workers}{prefetch})" if count else "") + waiting


def ratio_cells(*ratios: Spread | None) -> list[str]:
    """Each ratio with its range."""
    return [shown_ratio(one) for one in ratios]


def named_cell(result: RowResult, contestant: Contestant | None, part: Part = "whole") -> str:
    """Somebody's rate, and who it is."""
    return f"{rate_cell(result, contestant, count=False, part=part)}, {contestant.label}" if contestant else NOTHING


def table(header: Sequence[str], lines: Iterable[Line]) -> str:
    """A Markdown table; lines where dpex is behind come first, and say so."""
    ordered = sorted(lines, key=lambda line: not line.behind)
    cells = [header, ["---"] * len(header), *(line.cells for line in ordered)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def same_count(result: RowResult, seeding: Seeding | None) -> Spread | None:
    """dpex over torch, both with as many workers as there are cores."""
    return result.ratio(result.at_cores("dpex", seeding), result.at_cores("torch"))


def best_count(result: RowResult, seeding: Seeding | None) -> Spread | None:
    """dpex over torch, both with their best number of workers."""
    return result.ratio(result.best("dpex", seeding), result.best("torch"))


def torch_part(result: RowResult) -> Part:
    """The part of PyTorch's course that stands beside the whole course of "auto": after its start, as for the oracle,
    unless everybody's course is as long."""
    return "whole" if result.row.same_length else "settled"


def best_torch(result: RowResult) -> Contestant | None:
    """PyTorch's best setting in that part."""
    return result.best("torch", part=torch_part(result))


def auto_over(result: RowResult, other: Contestant | None) -> Spread | None:
    """The whole course of "auto" beside torch's after its start."""
    return result.ratio(AUTO, other, "whole", torch_part(result))
