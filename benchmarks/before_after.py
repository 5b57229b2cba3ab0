"""Is one checkout of dpex faster than another? `python -m benchmarks.before_after --base PATH --rows floats jpeg`.

The same measurement runs with the dpex of `--base` and with that of this checkout (or of `--new`), each in a process
of its own, in turns: the side that begins changes from round to round. The figure is the ratio of the rates within a
round, new over base, as median and range. "whole" counts from before `iter()` on, start-up included; "settled" is the
second half of the window alone. Beside them stands the processor time that a batch of that half took, of the process
and its workers, new over base: less is better, and other work on the machine changes it less.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.contestants import Contestant
from benchmarks.course import Course
from benchmarks.journal import Settings
from benchmarks.measure import Request
from benchmarks.process import ROOT, MeasurementError, Surroundings, with_dpex_of
from benchmarks.rows import BY_KEY
from benchmarks.rows import ROWS as ALL_ROWS
from benchmarks.runner import Turn, measured
from benchmarks.runner import request as request_for
from benchmarks.spread import Spread
from benchmarks.works import WORKS

ROWS = [row.key for row in ALL_ROWS if row.kind == "local"]


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One round: the courses with the base and with the new code."""

    base: Course
    new: Course

    @property
    def whole(self) -> float:
        """Ratio of the rates over the whole window."""
        return self.new.rate / self.base.rate

    @property
    def settled(self) -> float:
        """Ratio of the rates in the second half."""
        return self.new.settled_rate / self.base.settled_rate

    @property
    def cpu(self) -> float | None:
        """Ratio of the processor time per batch; None if it was too short to be told."""
        new_s, base_s = self.new.batch_cpu_s, self.base.batch_cpu_s
        return new_s / base_s if new_s and base_s else None


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.before_after", description=__doc__)
    parser.add_argument("--base", type=Path, required=True, metavar="PATH", help="a checkout to compare with")
    parser.add_argument("--new", type=Path, default=ROOT, metavar="PATH", help="the other checkout (this one)")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=ROWS[:3], metavar="ROW", help=", ".join(ROWS))
    parser.add_argument("--workers", nargs="+", default=["0", "2"], metavar="N", help='counts, or "auto" (0 2)')
    parser.add_argument(
        "--seeding", nargs="+", choices=("worker", "batch"), default=["worker", "batch"], help='not for "auto" (both)'
    )
    parser.add_argument("--rounds", type=int, default=7, help="pairs of measurements (7)")
    parser.add_argument("--window-s", type=float, default=3.0, help="seconds of each (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="append every pair as a line of JSON")
    return parser.parse_args(arguments)


def contestants(workers: Sequence[str], seedings: Sequence[Any]) -> list[Contestant]:
    """Every count with every seeding; "auto" with its own alone."""
    fixed = [int(count) for count in workers if count != "auto"]
    found = [Contestant(engine="dpex", workers=n, seeding=seeding) for n, seeding in product(fixed, seedings)]
    return found + [Contestant(engine="dpex", workers="auto")] * ("auto" in workers)


def measured_pair(request: Request, base: Surroundings, new: Surroundings, *, new_first: bool) -> Pair:
    """Both sides once, one after the other. Raises MeasurementError."""
    order = (new, base) if new_first else (base, new)
    courses = {where.folder: measured(request, where) for where in order}
    return Pair(base=courses[base.folder], new=courses[new.folder])


def line(title: str, pairs: Sequence[Pair]) -> str:
    """The row of the printed table: medians of the rates, and of the ratios with their ranges."""
    base, new = (Spread.of([getattr(pair, side).settled_rate for pair in pairs]).median for side in ("base", "new"))
    whole, settled = (Spread.of([getattr(pair, what) for pair in pairs]) for what in ("whole", "settled"))
    cpu = [pair.cpu for pair in pairs if pair.cpu is not None]
    shown = [_ratio(settled), _ratio(whole), *([_ratio(Spread.of(cpu))] if cpu else [])]
    return f"{title:52}{base:11,.1f}{new:11,.1f}   {'   '.join(shown)}"


def _ratio(spread: Spread) -> str:
    return f"{spread.median:.3f} ({spread.low:.3f} to {spread.high:.3f})"


def _compare(
    row: str, contestant: Contestant, options: argparse.Namespace, base: Surroundings, new: Surroundings
) -> None:
    turn = Turn(row=BY_KEY[row], round=0, contestant=contestant)
    request = request_for(turn, Settings(window_s=options.window_s))
    title, pairs = f"{row}, {contestant.label}", []
    for number in range(options.rounds):
        pairs.append(measured_pair(request, base, new, new_first=bool(number % 2)))
        if options.json:
            record = {"row": row, "contestant": contestant.as_dict(), "round": number}
            sides = {"base": pairs[-1].base.as_dict(), "new": pairs[-1].new.as_dict()}
            with options.json.open("a") as file:
                file.write(json.dumps(record | sides) + "\n")
    print(line(title, pairs), flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if everything could be measured."""
    options = parse(arguments)
    heading = f"{'batches per second; ratio new / base':52}{'base':>11}{'new':>11}   "
    print(f"{heading}{'settled':23}   {'whole, from iter() on':23}   CPU time a batch", flush=True)
    failed = 0
    for work in {BY_KEY[row].work for row in options.rows}:
        with WORKS[work].opened():  # makes its data outside of every window
            pass
    with ExitStack() as stack:
        base, new = (stack.enter_context(with_dpex_of(checkout)) for checkout in (options.base, options.new))
        for row, contestant in product(options.rows, contestants(options.workers, options.seeding)):
            try:
                _compare(row, contestant, options, base, new)
            except MeasurementError as error:
                failed += 1
                print(f"{f'{row}, {contestant.label}':52}not measured: {error}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
