"""`python -m benchmarks.network.compression`: what compressing batches is worth behind a link. Root only.

Eight remote workers, whose samples wait, send batches of 16 x 150 kB over a link (see `python -m benchmarks.network`),
with Zstandard at both ends and without. The two take turns, each in a process of its own; a ratio is taken within a
round, and the median of the rounds is shown with the lowest and highest. Every batch that is measured has been made
anew; none is compared here, as that takes the trainer's CPU.

A file of raw results is written after each measurement; the same command goes on with what is missing.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.machine import load
from benchmarks.network.__main__ import REMOTE, measured
from benchmarks.network.compression_table import (
    KEPT,
    QUOTED_ROUNDS,
    SUBJECT,
    compression_table,
    key_of,
    origin_text,
    problems,
)
from benchmarks.network.links import Link, why_not
from benchmarks.network.work import CONTENTS
from benchmarks.process import ROOT
from benchmarks.training import runs
from benchmarks.training.runs import Run

SPLIT = (0, REMOTE)
LINKS = (
    Link(bits_per_s=200e6, round_trip_s=1e-3),
    Link(bits_per_s=1e9, round_trip_s=1e-3),
    Link(bits_per_s=10e9),
)
SHOWN = ("photographs", "tokens", "floats")
LOCAL = runs.RESULTS / "local-compression.json"


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once everything has been measured, and kept where that was asked for."""
    options = _parse(arguments)
    if why := why_not():
        print(f"python -m benchmarks.network.compression: {why}", file=sys.stderr)
        return 2
    run = measured_run(options)
    print(f"{compression_table(run)}\n\n{origin_text(run)}")
    return 0 if runs.kept_if_asked(run, options.keep, problems, KEPT) else 1


def measured_run(options: argparse.Namespace) -> Run:
    """A run of all that was asked for; one that was ended goes on with what is missing."""
    links = [LINKS[at] for at in options.links]
    where = [[str(link), content] for link in links for content in options.content]
    settings = {"rounds": options.rounds, "window_s": options.window_s, "rows": where}
    run = runs.begun(SUBJECT, settings, options.results)
    for link in links:
        for content in options.content:
            key = key_of(str(link), content)
            for number, may_compress in turns(options.rounds):
                found = run.rows.get(key, ())
                if any((one["round"], one["may_compress"]) == (number, may_compress) for one in found):
                    continue
                before = load()
                one = measured(link, SPLIT, options.window_s, content=content, may_compress=may_compress)
                which = {"round": number, "may_compress": may_compress, "load": before}
                run = runs.with_row(run, key, [*found, which | one])
                runs.write(run, options.results)
                print(f"{key}, {may_compress}: {one['settled']:.1f}/s", file=sys.stderr, flush=True)
    return run


def turns(rounds: int) -> Iterator[tuple[int, bool]]:
    """Every measurement of a row, in order; every second round goes backwards."""
    for number in range(rounds):
        yield from ((number, may_compress) for may_compress in ((False, True) if number % 2 else (True, False)))


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network.compression", description=__doc__)
    numbered = "; ".join(f"{number}: {link}" for number, link in enumerate(LINKS))
    parser.add_argument("--links", nargs="+", type=int, default=[*range(len(LINKS))], metavar="N", help=numbered)
    parser.add_argument("--content", nargs="+", choices=CONTENTS, default=SHOWN, help="of the batches")
    parser.add_argument("--rounds", type=int, default=QUOTED_ROUNDS, help=f"rounds ({QUOTED_ROUNDS})")
    parser.add_argument("--window-s", type=float, default=8.0, help="seconds of a measurement; its second half counts")
    parser.add_argument("--results", type=Path, default=LOCAL, help=f"where they go ({LOCAL.relative_to(ROOT)})")
    parser.add_argument("--keep", metavar="NAME", help="keep a whole run as results/compression/compression-NAME.json")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
