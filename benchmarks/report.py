"""Write the tables of docs/benchmarks.md and the chart of README.md: `python -m benchmarks.report`; and a row as text.

Tables stand between `<!-- bench:NAME -->` and `<!-- /bench -->` and are made of the kept runs alone; a test fails where
they differ. The figures of a row are those of the newest run with rows of its kind. Rows in which dpex is slower come
first. The tables of whole trainings are those of `benchmarks.training.tables`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cells import (
    NOTHING,
    Line,
    auto_over,
    best_count,
    best_torch,
    named_cell,
    rate_cell,
    ratio_cells,
    same_count,
    shown_rate,
    shown_ratio,
    table,
    torch_part,
)
from benchmarks.chart import chart
from benchmarks.contestants import AUTO, Contestant
from benchmarks.keep import Kept, kept_runs
from benchmarks.process import ROOT
from benchmarks.results import RowResult, Seeding, is_behind
from benchmarks.rows import BY_KEY, Kind
from benchmarks.spread import Spread
from benchmarks.training import tables as trainings

DOCUMENTS = (ROOT / "docs/benchmarks.md",)
CHART = ROOT / "docs/benchmarks.svg"
BLOCK = re.compile(r"(?P<begin><!-- bench:(?P<name>[a-z-]+) -->\n)(?P<text>.*?)(?P<end><!-- /bench -->)", re.DOTALL)


# -- tables ------------------------------------------------------------------------------------------------------------


def _newest(runs: Sequence[Kept], kind: Kind) -> Kept | None:
    """The newest run with rows of that kind."""
    return next((run for run in runs if any(row.row.kind == kind for row in run.rows.values())), None)


def _rows(runs: Sequence[Kept], kind: Kind) -> list[RowResult]:
    """The rows of a kind, of the newest run that has some, in their order."""
    run = _newest(runs, kind)
    found = [run.rows[key] for key in BY_KEY if key in run.rows] if run is not None else []
    return [result for result in found if result.row.kind == kind]


def speed_table(runs: Sequence[Kept]) -> str:
    """dpex with fixed numbers of workers beside torch."""
    header = (
        "work",
        "torch, workers = cores",
        "torch, best",
        "dpex, workers = cores",
        "dpex, best",
        "dpex / torch, cores",
        "dpex / torch, best",
    )
    lines = [_speed_line(result, seeding) for result in _rows(runs, "local") for seeding in result.seedings]
    return table(header, lines)


def _speed_line(result: RowResult, seeding: Seeding | None) -> Line:
    ratios = same_count(result, seeding), best_count(result, seeding)
    who = (result.at_cores("torch"), result.best("torch"), result.at_cores("dpex", seeding))
    rates = [rate_cell(result, one) for one in (*who, result.best("dpex", seeding))]
    title = result.row.title + (f', `seeding="{seeding}"`' if seeding else "")
    return Line(cells=(title, *rates, *ratio_cells(*ratios)), behind=is_behind(*ratios))


def headline_table(runs: Sequence[Kept]) -> str:
    """`num_workers="auto"` beside torch, whose number of workers somebody has to choose."""
    header = (
        "work",
        "torch, workers = cores",
        "torch, best",
        'dpex, `num_workers="auto"`',
        "auto / torch, cores",
        "auto / torch, best",
    )
    return table(header, [_headline_line(result) for result in _rows(runs, "local") if AUTO in result.courses])


def _headline_line(result: RowResult) -> Line:
    """The whole course of auto beside torch's after its start, as for the oracle."""
    both = result.at_cores("torch"), best_torch(result)
    theirs = [rate_cell(result, one, part=torch_part(result)) for one in both]
    ratios = [auto_over(result, one) for one in both]
    cells = (result.row.title, *theirs, rate_cell(result, AUTO, count=False), *ratio_cells(*ratios))
    return Line(cells=cells, behind=is_behind(*ratios))


def headline_chart(runs: Sequence[Kept]) -> str:
    """`num_workers="auto"` over torch at its best number of workers, as an image."""
    found = [result for result in _rows(runs, "local") if AUTO in result.courses]
    ratios = [(result.row.title, auto_over(result, best_torch(result))) for result in found]
    return chart(
        'dpex, num_workers="auto", over PyTorch\'s DataLoader at its best number of workers',
        f"Batches/s, {len(found)} workloads, 2 CPUs, no GPU. dpex starts cold; PyTorch's number is the best of 9.",
        [(title, spread.median) for title, spread in ratios if spread is not None],
    )


def auto_table(runs: Sequence[Kept]) -> str:
    """`num_workers="auto"` beside the best of all fixed counts."""
    header = ("work", "oracle", "auto", "auto / oracle, whole course", "auto / oracle, after learning")
    return table(header, [_auto_line(result) for result in _rows(runs, "local") if AUTO in result.courses])


def _auto_line(result: RowResult) -> Line:
    ratios = result.to_oracle("whole"), result.to_oracle("settled")
    oracle = result.oracle("settled")
    name = f"{shown_rate(result, result.rate(oracle, 'settled').median)}, {oracle.label}" if oracle else NOTHING
    cells = (result.row.title, name, rate_cell(result, AUTO, count=False), *ratio_cells(*ratios))
    return Line(cells=cells, behind=is_behind(*ratios))


def rivals_table(runs: Sequence[Kept]) -> str:
    """Other loaders, each at its best setting, beside the best of dpex."""
    header = (
        "work",
        "dpex, best",
        "rival, best setting",
        "rival",
        "dpex / rival, whole course",
        "the same, after the start",
    )
    found = [*_rows(runs, "local"), *_rows(runs, "remote")]
    lines = [_rival_line(result, rival) for result in found for rival in result.best_rivals()]
    return table(header, lines)


def _rival_line(result: RowResult, rival: Contestant) -> Line:
    ours = result.best_dpex()
    ratios = result.ratio(ours, rival), result.ratio(ours, rival, "settled")
    cells = (result.row.title, named_cell(result, ours), rival.label, rate_cell(result, rival, count=False))
    return Line(cells=(*cells, *ratio_cells(*ratios)), behind=is_behind(*ratios))


def start_table(runs: Sequence[Kept]) -> str:
    """The time to the first batch."""
    header = ("work", "workers", "torch", "dpex", "sooner by")
    lines = [_start_line(result, workers) for result in _rows(runs, "start") for workers in sorted({0, result.cores})]
    return table(header, lines)


def _start_line(result: RowResult, workers: int) -> Line:
    torch, dpex = (Contestant(engine=engine, workers=workers) for engine in ("torch", "dpex"))
    ratio = result.ratio(dpex, torch)
    rates = [rate_cell(result, who if who in result.courses else None, count=False) for who in (torch, dpex)]
    return Line(cells=(result.row.title, str(workers), *rates, shown_ratio(ratio)), behind=is_behind(ratio))


def remote_table(runs: Sequence[Kept]) -> str:
    """Workers on another raylet, beside actor calls written by hand."""
    header = ("work", "actor calls, best", "dpex", "dpex / actor calls, whole course", "the same, after the start")
    return table(header, [_remote_line(result) for result in _rows(runs, "remote")])


def _remote_line(result: RowResult) -> Line:
    ours, theirs = result.best("dpex-remote"), result.best("actors")
    ratios = result.ratio(ours, theirs), result.ratio(ours, theirs, "settled")
    cells = (result.row.title, named_cell(result, theirs), rate_cell(result, ours, count=False), *ratio_cells(*ratios))
    return Line(cells=cells, behind=is_behind(*ratios))


def origin_text(runs: Sequence[Kept], kind: Kind = "local") -> str:
    """What the rows of a kind were measured on."""
    if (run := _newest(runs, kind)) is None:
        return "Not measured yet."
    machine, versions = run.machine, run.versions
    sizes = (
        f"{machine['last_level_cache_bytes'] / 2**20:.0f} MB last-level cache, {machine['memory_bytes'] / 2**30:.0f} GB"
    )
    return (
        f"{machine['processor']}, {machine['cores']} cores, {sizes}, {machine['system']}. Python {versions['python']}, "
        f"torch {versions['torch']}, Ray {versions['ray']}. Commit {(run.commit or 'unknown')[:10]}, {run.until[:10]}. "
        f"Rounds: at least {run.settings.rounds}{_lengths(run, kind)}, from `iter()` on. Figures are the median "
        "(range)."
    )


def _lengths(run: Kept, kind: Kind) -> str:
    settings = run.settings
    lengths = {
        "local": f' of {settings.window_s:g} s, of {settings.learning_window_s:g} s for "auto"',
        "remote": f" of {settings.window_s:g} s",
        "start": "",
    }
    return lengths[kind]


BLOCKS: dict[str, Callable[[Sequence[Kept]], str]] = {
    "origin": origin_text,
    "headline": headline_table,
    "speed": speed_table,
    "auto": auto_table,
    "rivals": rivals_table,
    "start": start_table,
    "start-origin": lambda runs: origin_text(runs, "start"),
    "remote": remote_table,
    "remote-origin": lambda runs: origin_text(runs, "remote"),
}


def names() -> tuple[str, ...]:
    """Return the names of all blocks."""
    return (*BLOCKS, *trainings.BLOCKS)


def rewritten(text: str, runs: Sequence[Kept]) -> str:
    """The text with every marked block made anew. Raises ValueError for a block that nobody knows, or without runs."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name in trainings.BLOCKS:
            return f"{match['begin']}{trainings.block(name)}\n{match['end']}"
        if name not in BLOCKS:
            raise ValueError(f"there is no block called {name!r}; there are {', '.join(names())}")
        if not runs:
            raise ValueError(f"the block {name!r} has no kept run to be made of: see benchmarks/README.md")
        return f"{match['begin']}{BLOCKS[name](runs)}\n{match['end']}"

    return BLOCK.sub(block, text)


# -- the terminal ------------------------------------------------------------------------------------------------------


def row_text(result: RowResult) -> str:
    """Every contestant, then what they come to."""
    lines = [result.row.title, *(_measured(result, contestant) for contestant in result.courses)]
    lines += [f"    {name:<46}{shown_ratio(spread):>14}" for name, spread in _figures(result) if spread is not None]
    return "\n".join(lines + [f"    {one.label}: failed: {why.splitlines()[-1]}" for one, why in result.failed.items()])


def _measured(result: RowResult, contestant: Contestant) -> str:
    rate, settled = result.rate(contestant), result.rate(contestant, "settled")
    shown, low, high, later = (shown_rate(result, one) for one in (rate.median, rate.low, rate.high, settled.median))
    waiting = f"  waiting {result.waiting(contestant):.0%}" if result.row.step_s else ""
    after = "" if result.row.kind == "start" else f"  settled {later}"
    return f"    {contestant.label:<46}{shown:>14}  ({low} to {high}){after}{waiting}"


def _figures(result: RowResult) -> list[tuple[str, Spread | None]]:
    found = []
    for seeding in result.seedings:
        note = f', seeding="{seeding}"' if seeding else ""
        found.append((f"dpex / torch, workers = cores{note}", same_count(result, seeding)))
        found.append((f"dpex / torch, best{note}", best_count(result, seeding)))
    found += [(f"auto / oracle, {part}", result.to_oracle(part)) for part in ("whole", "settled")]  # type: ignore[arg-type]
    found.append(("dpex / actor calls", result.ratio(result.best("dpex-remote"), result.best("actors"))))
    found += [(f"dpex, best / {one.label}", result.ratio(result.best_dpex(), one)) for one in result.best_rivals()]
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if the tables of all documents are those of the kept runs now. Where one cannot be made, none is written."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("documents", type=Path, nargs="*", metavar="FILE", help="whose tables (those of all documents)")
    parser.add_argument("--print", action="store_true", help="only print every table")
    options = parser.parse_args(arguments)
    runs = kept_runs()
    if options.print:
        print(*(f"<!-- bench:{name} -->\n{make(runs)}\n<!-- /bench -->" for name, make in BLOCKS.items()), sep="\n\n")
        return 0
    try:
        texts = {path: rewritten(path.read_text(), runs) for path in options.documents or DOCUMENTS}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    if not options.documents:
        CHART.write_text(headline_chart(runs))
    for path, text in texts.items():
        path.write_text(text)
        print(f"{len(BLOCK.findall(text))} tables of {path.name} made of {len(runs)} kept runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
