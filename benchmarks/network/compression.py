"""`python -m benchmarks.network.compression`: what compressing batches is worth behind a link. Root only.

Eight remote workers, whose samples wait, send batches of 16 x 150 kB over a link (see `python -m benchmarks.network`),
with Zstandard at both ends and without. The two take turns, each in a process of its own; a ratio is taken within a
round, and the median of the rounds is shown with the lowest and highest. Every batch that is measured has been made
anew; none is compared here, as that takes the trainer's CPU.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.machine import load
from benchmarks.network.__main__ import REMOTE, measured, run_of, write
from benchmarks.network.links import Link, why_not
from benchmarks.network.tables import KEPT
from benchmarks.network.work import CONTENTS

SPLIT = (0, REMOTE)
LINKS = (
    Link(bits_per_s=200e6, round_trip_s=1e-3),
    Link(bits_per_s=1e9, round_trip_s=1e-3),
    Link(bits_per_s=10e9),
)
SHOWN = ("photographs", "tokens", "floats")


def row(link: Link, content: str, rounds: Sequence[dict[bool, dict[str, Any]]]) -> str:
    """A line of the table."""
    ratios = [one[True]["settled"] / one[False]["settled"] for one in rounds]
    plain, compressed = (statistics.median(one[which]["settled"] for one in rounds) for which in (False, True))
    saved = statistics.median(saved_ratio(one[True]) for one in rounds)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f})"
    return f"| {link} | {content} | {plain:.1f} | {compressed:.1f} | {spread} | {saved:.0%} |"


def saved_ratio(found: dict[str, Any]) -> float:
    """The part of what would have travelled that did not, from the first batch on."""
    sent, saved = (sum(node[name] for node in found["nodes"].values()) for name in ("sent_bytes", "saved_bytes"))
    return float(saved / max(1, sent + saved))


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once everything has been measured and kept."""
    options = _parse(arguments)
    if why := why_not():
        print(f"python -m benchmarks.network.compression: {why}", file=sys.stderr)
        return 2
    lines = ["| link | content | without | with | with / without | saved |", "|---|---|---|---|---|---|"]
    kept: list[dict[str, Any]] = []
    for link in [LINKS[at] for at in options.links]:
        for content in options.content:
            rounds: list[dict[bool, dict[str, Any]]] = []
            for number in range(options.rounds):
                rounds.append({})
                for may_compress in (False, True) if number % 2 else (True, False):
                    before = load()
                    one = measured(link, SPLIT, options.window_s, content=content, may_compress=may_compress)
                    rounds[-1][may_compress] = one
                    what = {"link": str(link), "content": content, "may_compress": may_compress, "round": number}
                    kept.append({**what, "load": before, **one})
                    print(f"{link}, {content}, {may_compress}: {one['settled']:.1f}/s", file=sys.stderr, flush=True)
            lines.append(row(link, content, rounds))
            print(lines[-1], flush=True)
            write(options.results, run_of(kept) | {"table": "\n".join(lines)})
    print("\n".join(lines))
    return 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network.compression", description=__doc__)
    numbered = "; ".join(f"{number}: {link}" for number, link in enumerate(LINKS))
    parser.add_argument("--links", nargs="+", type=int, default=[*range(len(LINKS))], metavar="N", help=numbered)
    parser.add_argument("--content", nargs="+", choices=CONTENTS, default=SHOWN, help="of the batches")
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--window-s", type=float, default=8.0, help="seconds of a measurement; its second half counts")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    path = KEPT / f"local-compression-{stamp}.json"
    parser.add_argument("--results", type=Path, default=path, help="where they go")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    sys.exit(main())
