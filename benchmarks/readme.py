"""`python -m benchmarks.readme`: measure the table of README.md at this commit, and keep it.

It takes 25 minutes on an idle machine with two CPUs. A call that was cut off goes on at the same commit. Then
`python -m benchmarks.report` writes the table. With ``--quick`` nothing is kept.
"""

import argparse
import json
import os
import sys
from collections.abc import Sequence

from benchmarks import keep
from benchmarks.__main__ import RESULTS
from benchmarks.__main__ import main as measure_rows
from benchmarks.journal import Settings
from benchmarks.machine import commit
from benchmarks.parts import Parts
from benchmarks.process import ROOT, MeasurementError
from benchmarks.readme_table import FIXED, NODES, NODES_KEPT, NODES_S, PEER, TUNED
from benchmarks.rows import ROWS

KEYS = [row.key for row in ROWS if row.kind == "readme"]
LIMIT_S = 180.0
"""Seconds in which a course on nodes has to end."""


def measure_nodes(parts: Parts, rounds: int, seconds: float) -> bool:
    """Measure each loader on Ray nodes, in turns. Return False if a course failed; the others are kept."""
    who, failed = (FIXED, TUNED, PEER), 0
    for turn in range(rounds):
        for one in who[:: -1 if turn % 2 else 1]:
            argument = json.dumps([one, NODES, seconds])
            try:
                parts.measure("nodes", f"{one}, {turn}", "benchmarks.scale.nodes", argument, LIMIT_S)
            except MeasurementError as error:
                print(f"nodes, {one}, {turn}: {error}", file=sys.stderr)
                failed += 1
    return not failed


def main(arguments: Sequence[str]) -> int:
    """0 if everything was measured, and kept unless it was to be quick."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.readme", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two rounds of 2 s, one of 15 s on nodes; not kept")
    quick: bool = parser.parse_args(arguments).quick
    sha, dirty = commit(ROOT)
    if (dirty or sha is None) and not quick:
        print("figures are kept of a commit alone: commit the changes of dpex/ and benchmarks/ first", file=sys.stderr)
        return 2
    name = f"local-readme-{'quick-' if quick else ''}{(sha or 'none')[:10]}"
    journal, parts = RESULTS / f"{name}.jsonl", Parts(NODES_KEPT.with_name(f"{name}.json"))
    length = ["--quick"] if quick else []
    if status := measure_rows(["--rows", *KEYS, "--results", str(journal), *length]):
        return status
    if not measure_nodes(parts, 1 if quick else Settings().rounds, NODES_S / 2 if quick else NODES_S):
        return 1
    if quick:
        return 0
    if status := keep.main([str(journal), f"readme-{len(os.sched_getaffinity(0))}-cores"]):
        return status
    parts.path.replace(NODES_KEPT)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
