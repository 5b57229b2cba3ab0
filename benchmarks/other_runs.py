"""Tables beside those of the newest run: what other machines made of the rows, and rows measured again since.

`machines` has the newest run of each machine with local rows, of whichever commit. `later` has the newest run in
`results/parts/`, of rows in which only some took part (`python -m benchmarks.keep --part`): "auto" and the fixed
settings that were best, on a later commit than that of the other tables.
"""

from collections.abc import Callable, Sequence

from benchmarks.cells import (
    NOTHING,
    Figure,
    Line,
    auto_over,
    best_count,
    best_torch,
    named_cell,
    rate_cell,
    shown_ratio,
    table,
    to_oracle,
)
from benchmarks.contestants import AUTO
from benchmarks.keep import PARTS, Kept, kept_runs
from benchmarks.results import RowResult, is_behind
from benchmarks.rows import BY_KEY
from benchmarks.spread import Spread


def _auto_over_best(result: RowResult) -> Spread | None:
    return auto_over(best_torch(result))(result)


FIGURES: dict[str, Figure] = {"dpex / torch, best": best_count(None), "auto / torch, best": _auto_over_best}


def machines_table(runs: Sequence[Kept]) -> str:
    """The medians of the ratios to PyTorch's best, on the newest run of each machine."""
    newest = {run.machine_id: run for run in reversed(runs) if _local(run)}
    columns = [run for run in runs if newest.get(run.machine_id) is run]
    header = ("work", *(f"{name}: {_origin(run)}" for name in FIGURES for run in columns))
    keys = [key for key in BY_KEY if any(key in _local(run) for run in columns)]
    return table(header, [_machines_line(key, columns) for key in keys])


def _local(run: Kept) -> dict[str, RowResult]:
    return {key: row for key, row in run.rows.items() if row.row.kind == "local"}


def _origin(run: Kept) -> str:
    return f"{run.machine['processor']}, {run.machine['cores']} cores ({(run.commit or '')[:7]}, {run.until[:10]})"


def _machines_line(key: str, columns: Sequence[Kept]) -> Line:
    ratios = [figure(run.rows[key]) if key in run.rows else None for figure in FIGURES.values() for run in columns]
    cells = (f"{ratio.median:.2f}x" if ratio else NOTHING for ratio in ratios)
    return Line(cells=(BY_KEY[key].title, *cells), behind=is_behind(*ratios))


def later_table(parts: Sequence[Kept]) -> str:
    """The newest part: "auto" beside the best of the fixed settings that took part."""
    newest = parts[0]
    header = (
        f"work, on {_origin(newest)}",
        "best fixed setting",
        "auto",
        "auto / best, whole course",
        "auto / best, after learning",
        "auto / torch, best",
    )
    return table(header, [_later_line(newest.rows[key]) for key in BY_KEY if key in newest.rows])


def _later_line(result: RowResult) -> Line:
    whole, settled = to_oracle("whole")(result), to_oracle("settled")(result)
    best = named_cell(result, result.oracle("settled"), "settled")
    cells = (result.row.title, best, rate_cell(result, AUTO, count=False))
    ratios = (whole, settled, _auto_over_best(result))
    return Line(cells=(*cells, *(shown_ratio(ratio) for ratio in ratios)), behind=is_behind(*ratios))


BLOCKS: dict[str, Callable[[Sequence[Kept]], str]] = {"later": later_table}


def block(name: str) -> str:
    """The text of a block. Raises ValueError without a kept part to make it of."""
    parts = kept_runs(PARTS)
    if not parts:
        raise ValueError(f"the block {name!r} has no kept part to be made of: see benchmarks/README.md")
    return BLOCKS[name](parts)
