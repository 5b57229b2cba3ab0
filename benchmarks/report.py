"""Write the tables of README.md, docs/benchmarks.md and docs/scale.md: `python -m benchmarks.report`. A row as text.

The tables of `benchmarks.scale` and `benchmarks.origin` are made there. All others stand between `<!-- bench:NAME -->`
and `<!-- /bench -->` and are made of the kept runs alone. A test fails where they differ. A row has the
figures of the newest run with rows of its kind. Rows in which dpex is slower come first, but where each loader has a
line the fastest comes first.
"""

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from benchmarks import parts
from benchmarks.cells import (
    NOT_MEASURED,
    NOTHING,
    Line,
    named_cell,
    rate_cell,
    ratio_cells,
    shown_rate,
    shown_ratio,
    table,
)
from benchmarks.contestants import AUTO, LIMIT, Contestant
from benchmarks.keep import Kept, kept_runs
from benchmarks.origin import __main__ as origin
from benchmarks.process import ROOT
from benchmarks.readme_table import NODES_KEPT, nodes_origin, readme_table
from benchmarks.results import Part, RowResult, Seeding, Spread, is_behind
from benchmarks.rows import BY_KEY, Kind
from benchmarks.scale import __main__ as scale
from benchmarks.scale import page
from benchmarks.works import WORKS

DOCUMENTS = (ROOT / "README.md", ROOT / "docs/benchmarks.md")
PAGES = (*DOCUMENTS, page.DOCUMENT)
BLOCK = re.compile(r"(?P<begin><!-- bench:(?P<name>[a-z-]+) -->\n)(?P<text>.*?)(?P<end><!-- /bench -->)", re.DOTALL)

MEASURED = ("dpex/autotune/law", "dpex/engine", "dpex/pools", "dpex/transport")
"""Folders whose changes make figures old."""
MOST_SINCE = 100
"""Commits to `MEASURED` after which a figure must be measured again. All rows take two hours on an idle machine."""


# -- tables ------------------------------------------------------------------------------------------------------------


def same_count(result: RowResult, seeding: Seeding | None) -> Spread | None:
    """Return the ratio of dpex to torch, both with one worker per core."""
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


def loaders_table(runs: Sequence[Kept]) -> str:
    """Each loader at its best setting, the fastest first, with memory and processor time of all its processes."""
    header = ("work", "loader, best setting", "batches/s, whole course", "after the start", "memory", "CPU per batch")
    found = [(row, one) for row in _rows(runs, "loaders") for one in row.best_rivals("torch", "dpex")]
    return table(header, [_loader_line(*each) for each in found]) if found else NOT_MEASURED


def _loader_line(result: RowResult, contestant: Contestant) -> Line:
    rate, settled = result.rate(contestant), result.rate(contestant, "settled")
    low, high = shown_rate(result, rate.low), shown_rate(result, rate.high)
    whole = f"{rate_cell(result, contestant, count=False)} ({low} to {high})"
    memory = result.memory_bytes(contestant)
    shown = f"{memory / 1e9:.2f} GB" if memory else NOTHING
    rates = whole, shown_rate(result, settled.median)
    cells = (result.row.title, contestant.label, *rates, shown, _cpu(result, contestant))
    return Line(cells=cells, behind=False)


def _cpu(result: RowResult, contestant: Contestant) -> str:
    cpu_s = result.batch_cpu_s(contestant)
    return f"{1000 * cpu_s:.2f} ms" if cpu_s else NOTHING


def training_table(runs: Sequence[Kept]) -> str:
    """Images per second, waiting and efficiency of whole trainings: the best of torch's, and dpex."""
    rows = _rows(runs, "training")
    gpu = ("GPU stall",) if any(row.gpu_stall(LIMIT) for row in rows) else ()
    header = ("work", "loader", "images/s", "after learning", "waiting", *gpu, "efficiency after learning")
    return table(header, [_training_line(row, one) for row in rows for one in _trained(row)]) if rows else NOT_MEASURED


def _trained(result: RowResult) -> list[Contestant]:
    found = (LIMIT, result.best("torch", part="settled"), *(one for one in result.courses if one.engine == "dpex"))
    return [one for one in found if one in result.courses]


def _training_line(result: RowResult, contestant: Contestant) -> Line:
    """The efficiency is the rate over that with one batch again and again, within a round."""
    stall, work = result.gpu_stall(contestant), WORKS[result.row.work]
    batch = work.batch_size if stall is None else work.gpu_batch_size
    rates = [_images(result.rate(contestant, part), batch) for part in ("whole", "settled")]  # type: ignore[arg-type]
    shares = [result.waiting(contestant), *([stall] if stall else []), result.ratio(contestant, LIMIT, "settled")]
    place = ", this machine" if contestant.nodes == 0 else ""
    cells = (result.row.title, contestant.label + place, *rates, *map(_percent, shares))
    return Line(cells=cells, behind=False)


def _images(rate: Spread, batch: int) -> str:
    return f"{batch * rate.median:,.0f} ({batch * rate.low:,.0f} to {batch * rate.high:,.0f})"


def _percent(share: Spread | None) -> str:
    return f"{share.median:.0%} ({share.low:.0%} to {share.high:.0%})" if share else NOTHING


def origin_text(runs: Sequence[Kept], kind: Kind) -> str:
    """Name the machine, the versions and the commit of the rows of a kind."""
    if (run := _newest(runs, kind)) is None:
        return NOT_MEASURED
    machine, versions = run.machine, run.versions
    gpu = f", {name}" if (name := machine.get("gpu")) else ""
    sizes = (
        f"{machine['last_level_cache_bytes'] / 2**20:.0f} MB last-level cache, {machine['memory_bytes'] / 2**30:.0f} GB"
    )
    commit = f"Commit {(run.commit or 'unknown')[:10]}, {run.until[:10]}"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {sizes}, {machine['system']}{gpu}. "
        f"Python {versions['python']}, torch {versions['torch']}, Ray {versions['ray']}. {commit}. "
        f"Rounds: at least {run.settings.rounds}{_lengths(run, kind)}, from `iter()` on. Figures are the median "
        "(range)." + (f" {nodes_origin()}" if kind == "readme" else "")
    )


def _lengths(run: Kept, kind: Kind) -> str:
    settings = run.settings
    lengths = {
        "local": f' of {settings.window_s:g} s, of {settings.learning_window_s:g} s for "auto"',
        "remote": f" of {settings.window_s:g} s",
        "start": "",
        "loaders": f" of {settings.window_s:g} s, of {settings.learning_window_s:g} s under a step",
        "readme": f" of {settings.learning_window_s:g} s",
        "training": f" of {settings.learning_window_s:g} s, twice as long with further nodes",
    }
    return lengths[kind]


TABLES: dict[str, tuple[Kind, Callable[[Sequence[Kept]], str]]] = {
    "headline": ("local", headline_table),
    "speed": ("local", speed_table),
    "auto": ("local", auto_table),
    "start": ("start", start_table),
    "remote": ("remote", remote_table),
    "loaders": ("loaders", loaders_table),
    "readme": ("readme", lambda runs: readme_table(_rows(runs, "readme"))),
    "training": ("training", training_table),
}
"""The tables by name, and the kind of rows that each is made of."""
KINDS: dict[str, Kind] = {name: kind for name, (kind, _) in TABLES.items()}
BLOCKS: dict[str, Callable[[Sequence[Kept]], str]] = {
    **{name: make for name, (_, make) in TABLES.items()},
    **{f"{kind}-origin": partial(origin_text, kind=kind) for kind in dict.fromkeys(KINDS.values())},
}


def rewritten(text: str, runs: Sequence[Kept]) -> str:
    """The text with every marked block made anew. Raises ValueError for a block that nobody knows, or without runs."""

    def block(match: re.Match[str]) -> str:
        name = match["name"]
        if name not in BLOCKS:
            raise ValueError(f"there is no block called {name!r}; there are {', '.join(BLOCKS)}")
        if not runs:
            raise ValueError(f"the block {name!r} has no kept run to be made of: see benchmarks/README.md")
        return f"{match['begin']}{BLOCKS[name](runs)}\n{match['end']}"

    return BLOCK.sub(block, text)


# -- the terminal ------------------------------------------------------------------------------------------------------


def row_text(result: RowResult) -> str:
    """Show a line for each contestant, then the ratios."""
    lines = [result.row.title, *(_measured(result, contestant) for contestant in result.courses)]
    lines += [f"    {name:<46}{shown_ratio(spread):>14}" for name, spread in _figures(result) if spread is not None]
    return "\n".join(lines + [f"    {one.label}: failed: {why.splitlines()[-1]}" for one, why in result.failed.items()])


def _measured(result: RowResult, contestant: Contestant) -> str:
    rate, settled = result.rate(contestant), result.rate(contestant, "settled")
    shown, low, high, later = (shown_rate(result, one) for one in (rate.median, rate.low, rate.high, settled.median))
    waiting = f"  waiting {result.waiting(contestant).median:.0%}" if result.row.step_s else ""
    memory = f"  {bytes_ / 1e9:.2f} GB" if (bytes_ := result.memory_bytes(contestant)) else ""
    stall = f"  GPU stall {share.median:.0%}" if (share := result.gpu_stall(contestant)) else ""
    after = "" if result.row.kind == "start" else f"  settled {later}"
    cpu = f"  CPU {_cpu(result, contestant)}"
    return f"    {contestant.label:<46}{shown:>14}  ({low} to {high}){after}{waiting}{stall}{memory}{cpu}"


def _figures(result: RowResult) -> list[tuple[str, Spread | None]]:
    found = []
    for base in result.fixed("base"):
        ours, of = replace(base, engine="dpex"), f"{base.label.removeprefix('dpex of the base, ')} / base"
        found += [(f"{of}, {part}", result.ratio(ours, base, part)) for part in ("settled", "whole")]  # type: ignore[arg-type]
        found.append((f"{of}, processor time of a batch", result.cpu_ratio(ours, base)))
    for seeding in result.seedings if not found else ():
        note = f', seeding="{seeding}"' if seeding else ""
        found.append((f"dpex / torch, workers = cores{note}", same_count(result, seeding)))
        found.append((f"dpex / torch, best{note}", best_count(result, seeding)))
    found += [(f"auto / oracle, {part}", result.to_oracle(part)) for part in ("whole", "settled")]  # type: ignore[arg-type]
    found.append(("dpex / actor calls", result.ratio(result.best("dpex-remote"), result.best("actors"))))
    found += [(f"dpex, best / {one.label}", result.ratio(result.best_dpex(), one)) for one in result.best_rivals()]
    return found


def parts_tables() -> dict[str, str]:
    """Make the blocks of the pages of `benchmarks.scale` and `benchmarks.origin`."""
    return page.tables(json.loads(scale.KEPT.read_text())) | origin.tables(json.loads(origin.KEPT.read_text()))


def commits_since(commit: str | None, until: str | None = None, root: Path = ROOT) -> int | None:
    """Return how many commits have changed `MEASURED` since a commit, or since a time; None if git cannot tell."""
    times = [[f"--since={until}", "HEAD"]] if until else []  # a clone may not have the commit
    for since in ([f"{commit}..HEAD"], *times):
        command = ["git", "rev-list", "--count", "--no-merges", *since, "--", *MEASURED]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return int(done.stdout)
    return None


def quoted_first(runs: Sequence[Kept]) -> list[Kept]:
    """Return the runs whose figures stand in README.md and in the first table of docs/benchmarks.md."""
    readme, page = ([block["name"] for block in BLOCK.finditer(path.read_text())] for path in DOCUMENTS)
    first = next(name for name in page if name in KINDS)
    kinds = dict.fromkeys(KINDS[name] for name in [*readme, first] if name in KINDS)
    return [run for kind in kinds if (run := _newest(runs, kind)) is not None]


def age(kept: Kept, root: Path = ROOT) -> str:
    """Return a line on a kept run: its commit, its rows, and how far the measured code has moved on."""
    rows = f"{len(kept.rows)} row{'s' * (len(kept.rows) != 1)} of {kept.until[:10]}"
    return _age(rows, kept.commit, kept.until, root)


def _age(what: str, commit: str | None, until: str | None = None, root: Path = ROOT) -> str:
    since = commits_since(commit, until, root)
    known = "unknown here" if since is None else f"{since} commits to {', '.join(MEASURED)} since"
    again = ": measure again" if since is not None and since > MOST_SINCE else ""
    return f"{what} at {(commit or 'no commit')[:8]}: {known}{again}"


def parts_ages() -> Iterator[str]:
    """Yield a line for the results of `benchmarks.scale`, of the row on nodes, and of `benchmarks.origin`."""
    for path in (scale.KEPT, NODES_KEPT, origin.KEPT):
        sha, _ = json.loads(path.read_text())["commit"]
        yield _age(str(path.relative_to(ROOT)), sha)


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the tables of all documents; return 0. Where one cannot be made, write none and return 1."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.report", description=__doc__)
    parser.add_argument("documents", type=Path, nargs="*", metavar="FILE", help="to write (all documents)")
    parser.add_argument("--print", action="store_true", help="only print every table")
    options = parser.parse_args(arguments)
    runs = kept_runs()
    if options.print:
        print(*(f"<!-- bench:{name} -->\n{make(runs)}\n<!-- /bench -->" for name, make in BLOCKS.items()), sep="\n\n")
        return 0
    try:
        blocks = parts_tables()
        pages = options.documents or PAGES
        texts = {path: parts.rewritten(rewritten(path.read_text(), runs), blocks) for path in pages}
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    for path, text in texts.items():
        path.write_text(text)
        found = len(BLOCK.findall(text)) + len(parts.places(text))
        print(f"{found} tables of {path.name} made of what is kept")
    print(*map(age, runs), *parts_ages(), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
