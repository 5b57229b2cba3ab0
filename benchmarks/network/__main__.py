"""`python -m benchmarks.network`: what remote workers are worth behind each link, and what "auto" finds. Root only.

A trainer and a node are network namespaces of this machine, joined by a link of a given rate, round trip and loss (see
`links`). Samples wait, so that workers anywhere are worth as much as local ones, and the link decides. Two local
workers at most, up to eight remote. For each link: all local; some fixed splits; and "auto", which starts cold.
Contestants take turns, each in a process of its own; ratios are taken within a round, and the median of the rounds is
shown with the lowest and highest. Results are written after each measurement; with `--results FILE` of a run of the
same commit that was ended, what is missing is measured.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from benchmarks.journal import now
from benchmarks.machine import commit, load, machine, versions
from benchmarks.network.links import Link, Network, why_not
from benchmarks.network.measure import Request
from benchmarks.network.tables import KEPT, problems, rates, table
from benchmarks.network.work import CONTENTS
from benchmarks.process import ROOT

LOCAL, REMOTE = 2, 8
AUTO = None
SPLITS: tuple[tuple[int, int] | None, ...] = ((LOCAL, 0), (LOCAL, 2), (LOCAL, REMOTE), (0, REMOTE), AUTO)
MILLISECOND = 1e-3
LINKS = (
    Link(bits_per_s=10e9),
    Link(bits_per_s=1e9, round_trip_s=MILLISECOND),
    Link(bits_per_s=200e6, round_trip_s=MILLISECOND),
)
START_LIMIT_S = 60.0


def name_of(split: tuple[int, int] | None) -> str:
    """A contestant, for people."""
    return "auto" if split is None else f"{split[0]} local, {split[1]} remote" if split[1] else "all local"


def measured(link: Link, split: tuple[int, int] | None, window_s: float, **work: Any) -> dict[str, Any]:
    """One measurement behind that link; with rates of 0 and the reason where it did not end in time."""
    limit_s = START_LIMIT_S + 4 * window_s
    with Network([link]) as network:
        request = Request(
            split=split,
            most=(LOCAL, REMOTE),
            nodes=network.nodes,
            reached_at=network.address,
            rooms=[REMOTE],
            window_s=window_s,
            **work,
        )
        command = [sys.executable, "-m", "benchmarks.network.measure", json.dumps(asdict(request))]
        try:
            done = subprocess.run(
                [*network.enter(network.trainer), *command],
                cwd=ROOT,
                check=True,
                capture_output=True,
                text=True,
                timeout=limit_s,
            )
        except subprocess.TimeoutExpired:  # no batch came, so that the window never ended
            return {"batches": 0, "rate": 0.0, "settled": 0.0, "error": f"it had not ended after {limit_s:g} s"}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def turns(rounds: int, splits: Sequence[tuple[int, int] | None]) -> Iterator[tuple[int, tuple[int, int] | None]]:
    """Every measurement of a link, in order; every second round goes backwards."""
    for number in range(rounds):
        yield from ((number, split) for split in splits[:: -1 if number % 2 else 1])


def main(arguments: Sequence[str] | None = None) -> int:
    """0 once everything has been measured and kept."""
    options = _parse(arguments)
    if options.keep and options.compression:
        print("python -m benchmarks.network: a run with --compression is not kept", file=sys.stderr)
        return 2
    if why := why_not():
        print(f"python -m benchmarks.network: {why}", file=sys.stderr)
        return 2
    kept = begun(options.results)
    done = {(one["link"], one["round"], one["contestant"]) for one in kept}
    for link in (LINKS[at] for at in options.links):
        for number, split in turns(options.rounds, SPLITS):
            if (str(link), number, name_of(split)) in done:
                continue
            window_s = options.window_s if split is not None else options.learning_window_s
            before = load()
            one = measured(link, split, window_s, content=options.content, compression=options.compression)
            kept.append({"link": str(link), "round": number, "contestant": name_of(split), "load": before, **one})
            print(f"{link}: {name_of(split)}: {one['settled']:.1f}/s", file=sys.stderr, flush=True)
            write(options.results, run_of(kept))
    print(table(rates(kept)))
    run = run_of(kept)
    against = [] if options.keep is None else problems(run)
    if options.keep and not against:
        write(KEPT / f"{options.keep}.json", run)
    for why in against:
        print(f"not kept: {why}", file=sys.stderr)
    return int(bool(against))


def begun(path: Path) -> list[dict[str, Any]]:
    """The measurements of a run that was ended, if there is one. Raises SystemExit where it is of another commit."""
    if not path.exists():
        return []
    run = json.loads(path.read_text())
    head, dirty = commit(ROOT)
    if (run["commit"], run["dirty"]) != (head, dirty):
        raise SystemExit(f"{path} is of commit {run['commit']}, and this is {head}: take another --results")
    found: list[dict[str, Any]] = run["measurements"]
    return found


def run_of(measurements: list[dict[str, Any]]) -> dict[str, Any]:
    """What is written of a run: its measurements, and what they were made on."""
    head, dirty = commit(ROOT)
    about = {"commit": head, "dirty": dirty, "machine": machine(), "versions": versions(), "until": now()}
    return about | {"measurements": measurements}


def write(path: Path, run: dict[str, Any]) -> None:
    """Write a run as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(run, indent=1) + "\n")


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.network", description=__doc__)
    parser.add_argument("--links", nargs="+", type=int, default=[*range(len(LINKS))], metavar="N", help=_numbered())
    parser.add_argument("--rounds", type=int, default=3, help="rounds (3)")
    parser.add_argument("--window-s", type=float, default=12.0, help="seconds of a measurement; its second half counts")
    parser.add_argument("--learning-window-s", type=float, default=24.0, help='the same for "auto"')
    parser.add_argument("--compression", choices=("zstd",), help="the loader's option; such a run is not kept")
    parser.add_argument("--content", choices=CONTENTS, default="noise", help="of the batches (noise)")
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    parser.add_argument("--results", type=Path, default=KEPT / f"local-{stamp}.json", help="where they go")
    parser.add_argument("--keep", metavar="NAME", help="keep the run as results/network/NAME.json")
    return parser.parse_args(arguments)


def _numbered() -> str:
    return "; ".join(f"{number}: {link}" for number, link in enumerate(LINKS)).replace("%", "%%")  # as argparse wants


if __name__ == "__main__":
    sys.exit(main())
