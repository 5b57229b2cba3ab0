"""The table of README.md: what people type, PyTorch's best of a sweep, and "auto"; one row is on Ray nodes."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.cells import NOT_MEASURED, NOTHING, Line, rate_cell, shown_ratio, table
from benchmarks.contestants import AUTO, Contestant
from benchmarks.process import ROOT
from benchmarks.results import SHOWN_DIGITS, RowResult, is_behind
from benchmarks.scale.nodes import CPUS, ideal

NODES_KEPT = ROOT / "benchmarks/results/scale/readme.json"
"""The courses on Ray nodes: `{"commit": [sha, dirty], "nodes": {"WHO, ROUND": figures}}`."""
NODES, NODES_S = 4, 30.0
"""Nodes of these courses, and seconds of one."""
FIXED, TUNED, PEER = "dpex", "auto", "Ray Data, actors"
"""The contestants of these courses, named as in `benchmarks.scale.nodes`."""


def readme_table(rows: Sequence[RowResult], nodes: Path = NODES_KEPT) -> str:
    """Courses of one length from a cold start, and the row on nodes. Rows in which "auto" is slower come first."""
    if not rows:
        return NOT_MEASURED
    cores = rows[0].cores
    header = (
        f"{cores} CPUs, no GPU; batches/s",
        f"PyTorch, `num_workers={cores}`",
        "PyTorch, best of a sweep",
        'dpex, `"auto"`',
        '`"auto"` over the best',
    )
    lines = [line for row in rows for line in _lines(row)]
    return table(header, [*lines, _node_line(json.loads(nodes.read_text()))])


def _lines(result: RowResult) -> Iterator[Line]:
    """Yield a line for each form of the dataset."""
    best = result.best("torch")
    forms = (one for one in result.courses if one.engine == "dpex" and one.form)
    for ours in (AUTO, *forms):
        title = result.row.title + (", `async` dataset" if ours.form else "")
        yield _line(result, title, best, ours)


def _line(result: RowResult, title: str, best: Contestant | None, ours: Contestant) -> Line:
    ratio = result.ratio(ours, best)
    theirs = rate_cell(result, result.at_cores("torch"), count=False), rate_cell(result, best)
    cells = (title, *theirs, rate_cell(result, ours, count=False), shown_ratio(ratio))
    return Line(cells=cells, behind=is_behind(ratio))


def _node_line(found: dict[str, Any]) -> Line:
    """Rates beside the ideal of the nodes, with Ray Data in the place of PyTorch."""
    work = f"{NODES} Ray nodes with {CPUS} workers each, samples that wait: at most {ideal(NODES):g}/s"
    fixed = f"{_node_rate(found, FIXED)}, `num_workers={CPUS * NODES}`"
    ratio = _rate(found, TUNED) / _rate(found, PEER)
    cells = (work, NOTHING, f"Ray Data: {_node_rate(found, PEER)}", f"{_node_rate(found, TUNED)}; {fixed}")
    return Line(cells=(*cells, f"{ratio:.2f}x"), behind=round(ratio, SHOWN_DIGITS) < 1)


def _node_rate(found: dict[str, Any], who: str) -> str:
    rate = _rate(found, who)
    return f"{rate:,.0f}/s, {rate / ideal(NODES):.0%}"


def _rate(found: dict[str, Any], who: str) -> float:
    return median(one["rate"] for key, one in found["nodes"].items() if key.rpartition(", ")[0] == who)


def nodes_origin(nodes: Path = NODES_KEPT) -> str:
    """Describe the nodes, the commit and the rounds of the row on nodes."""
    found = json.loads(nodes.read_text())
    rounds = len({key.rpartition(", ")[2] for key in found["nodes"]})
    return (
        f"Nodes: raylets of this machine, commit {found['commit'][0][:10]}; rounds: {rounds} of {NODES_S:g} s, the "
        'rate of the second half. There `"auto"` has workers of the trainer\'s machine, too.'
    )
