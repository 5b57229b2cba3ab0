"""Write the tables of docs/benchmarks.md and the chart of README.md: `python -m benchmarks.report`; and a row as text.

Tables stand between `<!-- bench:NAME -->` and `<!-- /bench -->` and are made of the kept runs alone; a test fails where
they differ. The figures of a row are those of the newest run with rows of its kind. Where other machines measured it on
the same commit, the range of the medians over all machines stands beside its ratio. Rows in which dpex is slower come
first. The tables of whole trainings are those of `benchmarks.training.tables`.
"""

import argparse
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.cells import (
    NOTHING,
    Figure,
    Line,
    auto_over,
    best_count,
    best_torch,
    named_cell,
    of_limit,
    rate_cell,
    same_count,
    shown_rate,
    shown_ratio,
    table,
    to_oracle,
    torch_part,
)
from benchmarks.chart import chart
from benchmarks.contestants import AUTO, Contestant
from benchmarks.keep import Kept, kept_runs
from benchmarks.process import ROOT
from benchmarks.results import Part, RowResult, Seeding, is_behind
from benchmarks.rows import BY_KEY, Kind
from benchmarks.spread import Spread
from benchmarks.training import tables as trainings

DOCUMENTS = (ROOT / "docs/benchmarks.md",)
CHART = ROOT / "docs/benchmarks.svg"
BLOCK = re.compile(r"(?P<begin><!-- bench:(?P<name>[a-z-]+) -->\n)(?P<text>.*?)(?P<end><!-- /bench -->)", re.DOTALL)


# -- tables ------------------------------------------------------------------------------------------------------------


def _across(results: Sequence[RowResult], figure: Figure) -> str:
    """The newest run's ratio, and the range of the medians where there are several machines."""
    found = [spread for result in results if (spread := figure(result)) is not None]
    own = figure(results[0])
    if own is None or len(found) < 2:
        return shown_ratio(own)
    medians = [spread.median for spread in found]
    return f"{shown_ratio(own)}; {min(medians):.2f} to {max(medians):.2f} on {len(found)} machines"


def _rows(runs: Sequence[Kept], kind: Kind) -> list[list[RowResult]]:
    """The rows of a kind on the newest commit that has some, each by all machines that measured it, newest first."""
    alike = _with_rows(runs, kind)
    found = [[run.rows[key] for run in alike if key in run.rows] for key in BY_KEY]
    return [results for results in found if results and results[0].row.kind == kind]


def _with_rows(runs: Sequence[Kept], kind: Kind) -> list[Kept]:
    """The newest run with rows of that kind, and one of each other machine that measured some on its commit."""
    with_some = [run for run in runs if any(row.row.kind == kind for row in run.rows.values())]
    found = {run.machine_id: run for run in reversed(with_some) if run.commit == with_some[0].commit}
    return sorted(found.values(), key=with_some.index)


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
        "dpex / limit",
    )
    lines = [_speed_line(results, seeding) for results in _rows(runs, "local") for seeding in results[0].seedings]
    return table(header, lines)


def _speed_line(results: Sequence[RowResult], seeding: Seeding | None) -> Line:
    result = results[0]
    same, best = same_count(seeding), best_count(seeding)
    who = (result.at_cores("torch"), result.best("torch"), result.at_cores("dpex", seeding))
    rates = [rate_cell(result, one) for one in (*who, result.best("dpex", seeding))]
    limit = result.ratio(result.best("dpex"), result.limit)
    title = result.row.title + (f', `seeding="{seeding}"`' if seeding else "")
    share = f"{limit.median:.2f}" if limit else NOTHING
    cells = (title, *rates, _across(results, same), _across(results, best), share)
    return Line(cells=cells, behind=is_behind(same(result), best(result)))


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
    return table(header, [_headline_line(results) for results in _rows(runs, "local") if AUTO in results[0].courses])


def _headline_line(results: Sequence[RowResult]) -> Line:
    """The whole course of auto beside torch's after its start, as for the oracle."""
    result = results[0]
    guess, best = result.at_cores("torch"), best_torch(result)
    theirs = [rate_cell(result, one, part=torch_part(result)) for one in (guess, best)]
    auto = rate_cell(result, AUTO, count=False)
    cells = (result.row.title, *theirs, auto, _across(results, auto_over(guess)), _across(results, auto_over(best)))
    return Line(cells=cells, behind=is_behind(auto_over(guess)(result), auto_over(best)(result)))


def headline_chart(runs: Sequence[Kept]) -> str:
    """`num_workers="auto"` over torch at its best number of workers, as an image."""
    found = [results[0] for results in _rows(runs, "local") if AUTO in results[0].courses]
    ratios = [(result.row.title, auto_over(best_torch(result))(result)) for result in found]
    return chart(
        'dpex, num_workers="auto", over PyTorch\'s DataLoader at its best number of workers',
        f"Batches/s, {len(found)} workloads, 2 CPUs, no GPU. dpex starts cold; PyTorch's number is the best of 9.",
        [(title, spread.median) for title, spread in ratios if spread is not None],
    )


def auto_table(runs: Sequence[Kept]) -> str:
    """`num_workers="auto"` beside the best of all fixed counts."""
    header = ("work", "oracle", "auto", "auto / oracle, whole course", "auto / oracle, after learning")
    return table(header, [_auto_line(results) for results in _rows(runs, "local") if AUTO in results[0].courses])


def _auto_line(results: Sequence[RowResult]) -> Line:
    result = results[0]
    whole, settled = to_oracle("whole"), to_oracle("settled")
    oracle = result.oracle("settled")
    name = f"{shown_rate(result, result.rate(oracle, 'settled').median)}, {oracle.label}" if oracle else NOTHING
    cells = (result.row.title, name, rate_cell(result, AUTO, count=False))
    return Line(
        cells=(*cells, _across(results, whole), _across(results, settled)),
        behind=is_behind(whole(result), settled(result)),
    )


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
    found = [results for kind in ("local", "remote") for results in _rows(runs, kind)]  # type: ignore[arg-type]
    lines = [_rival_line(results, rival) for results in found for rival in results[0].best_rivals()]
    return table(header, lines)


def _rival_line(results: Sequence[RowResult], rival: Contestant) -> Line:
    result = results[0]
    ours = result.best_dpex()

    def ratio(part: Part) -> Figure:
        return lambda one: one.ratio(one.best_dpex(), rival, part)

    whole, settled = ratio("whole"), ratio("settled")
    cells = (result.row.title, named_cell(result, ours), rival.label, rate_cell(result, rival, count=False))
    return Line(
        cells=(*cells, _across(results, whole), _across(results, settled)),
        behind=is_behind(whole(result), settled(result)),
    )


def start_table(runs: Sequence[Kept]) -> str:
    """The time to the first batch."""
    header = ("work", "workers", "torch", "dpex", "sooner by")
    lines = [
        _start_line(results, workers) for results in _rows(runs, "start") for workers in sorted({0, results[0].cores})
    ]
    return table(header, lines)


def _start_line(results: Sequence[RowResult], workers: int) -> Line:
    result = results[0]
    torch, dpex = (Contestant(engine=engine, workers=workers) for engine in ("torch", "dpex"))

    def ratio(one: RowResult) -> Spread | None:
        return one.ratio(dpex, torch)

    cells = [rate_cell(result, who if who in result.courses else None, count=False) for who in (torch, dpex)]
    line = (result.row.title, str(workers), *cells, _across(results, ratio))
    return Line(cells=line, behind=is_behind(ratio(result)))


def remote_table(runs: Sequence[Kept]) -> str:
    """Workers on another raylet, beside actor calls written by hand."""
    header = ("work", "actor calls, best", "dpex", "dpex / actor calls, whole course", "the same, after the start")
    return table(header, [_remote_line(results) for results in _rows(runs, "remote")])


def _remote_line(results: Sequence[RowResult]) -> Line:
    result = results[0]
    theirs = result.best("actors")

    def ratio(part: Part) -> Figure:
        return lambda one: one.ratio(one.best("dpex-remote"), one.best("actors"), part)

    whole, settled = ratio("whole"), ratio("settled")
    ours = rate_cell(result, result.best("dpex-remote"), count=False)
    cells = (result.row.title, named_cell(result, theirs), ours, _across(results, whole), _across(results, settled))
    return Line(cells=cells, behind=is_behind(whole(result), settled(result)))


def origin_text(runs: Sequence[Kept], kind: Kind = "local") -> str:
    """What the rows of a kind were measured on."""
    if not (measured := _with_rows(runs, kind)):
        return "Not measured yet."
    run = measured[0]
    machine, versions = run.machine, run.versions
    sizes = (
        f"{machine['last_level_cache_bytes'] / 2**20:.0f} MB last-level cache, {machine['memory_bytes'] / 2**30:.0f} GB"
    )
    return (
        f"{machine['processor']}, {machine['cores']} cores, {sizes}, {machine['system']}. Python {versions['python']}, "
        f"torch {versions['torch']}, Ray {versions['ray']}. Commit {(run.commit or 'unknown')[:10]}, {run.until[:10]}. "
        f"Rounds: {run.settings.rounds}{_lengths(run, kind)}, from `iter()` on. Figures are the median (range). "
        f"Machines: {len(measured)}."
    )


def _lengths(run: Kept, kind: Kind) -> str:
    settings = run.settings
    lengths = {
        "local": f' of {settings.window_s:g} s, of {settings.learning_window_s:g} s for "auto"{_further(run)}',
        "remote": f" of {settings.window_s:g} s",
        "start": "",
    }
    return lengths[kind]


def _further(run: Kept) -> str:
    """The rounds that "auto" and the best fixed settings have beyond everybody's, in every row."""
    numbers = [len(row.courses[AUTO]) for row in run.rows.values() if row.row.kind == "local" and AUTO in row.courses]
    fewest = min(numbers, default=0)
    return f" (which has {fewest} rounds, as have the best fixed settings)" if fewest > run.settings.rounds else ""


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
        found.append((f"dpex / torch, workers = cores{note}", same_count(seeding)(result)))
        found.append((f"dpex / torch, best{note}", best_count(seeding)(result)))
    found += [(f"auto / oracle, {part}", to_oracle(part)(result)) for part in ("whole", "settled")]  # type: ignore[arg-type]
    found.append(("dpex / actor calls", result.ratio(result.best("dpex-remote"), result.best("actors"))))
    found += [(f"dpex, best / {one.label}", result.ratio(result.best_dpex(), one)) for one in result.best_rivals()]
    return [*found, ("dpex, best / limit", of_limit(result))]


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
    CHART.write_text(headline_chart(runs))
    for path, text in texts.items():
        path.write_text(text)
        print(f"{len(BLOCK.findall(text))} tables of {path.name} made of {len(runs)} kept runs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
