"""Sweep the controller's constants over a set of scenarios: `python -m benchmarks.simulation.fit`.

Each constant (`dpex.autotune.constants`) is multiplied by each factor in turn, with all others as they are, and the set
is played anew. The table says what becomes of the mean regret, of the share of worlds above 5 %, and of the share of
worlds with few decisions; a constant whose row hardly changes needs no care, one with a better value than its own wants
a look at the validation set. Without ``--constant`` all are swept, which takes an hour or two.
`benchmarks.simulation.without` tells which scenario gets worse without each constant.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from multiprocessing import Pool
from statistics import fmean

from benchmarks.simulation import kept
from benchmarks.simulation.scenarios import DEVELOPMENT, SETS, load
from benchmarks.simulation.score import MOST_DECISIONS, MOST_REGRET, play
from dpex.autotune.constants.groups import described, group_of

FACTORS = (0.5, 0.7, 1.4, 2.0)
_ROW = "{:34} {:>12} {:>9} {:>9} {:>9}"


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Of a set: mean regret, share of worlds above the most that is allowed, share of worlds with few decisions."""

    regret: float
    above: float
    few: float


def constants() -> dict[str, float]:
    """Values by name, as in "grow.votes"."""
    return {name: each.value for name, each in described().items()}


@contextmanager
def changed(values: Mapping[str, float]) -> Iterator[None]:
    """Constants have these values meanwhile, for everybody: there is one object of each group."""
    before = {name: constants()[name] for name in values}
    _set(values)
    try:
        yield
    finally:
        _set(before)


def _set(values: Mapping[str, float]) -> None:
    for name, value in values.items():
        object.__setattr__(group_of(name), name.partition(".")[2], value)  # frozen for everybody else


def outcome(of: str, names: Sequence[str], values: Mapping[str, float]) -> Outcome:
    """Play scenarios of a set with these values of constants."""
    with changed(values):
        results = [play(load(of)[name], kept.truths(of, load(of)[name])) for name in names]
    return Outcome(
        regret=fmean(result.regret for result in results),
        above=fmean(result.regret > MOST_REGRET for result in results),
        few=fmean(result.decisions <= MOST_DECISIONS for result in results),
    )


def _variants(chosen: Iterable[str], factors: Sequence[float]) -> Iterator[dict[str, float]]:
    known = constants()
    yield {}
    for key in chosen:
        for factor in factors:
            value = known[key] * factor
            yield {key: max(1, round(value)) if isinstance(known[key], int) else value}


def _row(values: Mapping[str, float], found: Outcome) -> str:
    name, value = next(iter(values.items()), ("as they are", 0.0))
    shown = f"{value:.4g}" if values else ""
    return _ROW.format(name, shown, f"{found.regret:.2%}", f"{found.above:.1%}", f"{found.few:.1%}")


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation.fit", description=(__doc__ or "").strip())
    parser.add_argument("--constant", action="append", metavar="GROUP.NAME", help="only this one; may be repeated")
    parser.add_argument("--factor", action="append", type=float, help=f"instead of {FACTORS}; may be repeated")
    parser.add_argument("--set", choices=SETS, default=DEVELOPMENT)
    parser.add_argument("--only", action="append", metavar="NAME", help="only this scenario; may be repeated")
    options = parser.parse_args(arguments)
    if unknown := set(options.constant or ()) - constants().keys():
        parser.error(f"no constant is called {', '.join(sorted(unknown))}; there are {', '.join(sorted(constants()))}")
    variants = list(_variants(options.constant or sorted(constants()), options.factor or FACTORS))
    write(_ROW.format("constant", "value", "regret", "above 5 %", f"<= {MOST_DECISIONS} dec."))
    with Pool() as pool:
        results = pool.imap(partial(outcome, options.set, options.only or sorted(load(options.set))), variants)
        for values, found in zip(variants, results, strict=True):
            write(_row(values, found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
