"""The table of links, made of the newest kept run: `benchmarks.report` writes it into docs/scale.md."""

import json
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.process import ROOT

KEPT = ROOT / "benchmarks" / "results" / "network"
AUTO, LOCAL = "auto", "all local"
QUOTED_ROUNDS = 3
Rates = Mapping[str, Sequence[Mapping[str, float]]]
"""By link, for each round: the settled rate of every contestant, in batches per second."""


def rates(measurements: Iterable[Mapping[str, Any]]) -> dict[str, list[dict[str, float]]]:
    """By link, in the order in which they were measured."""
    found: dict[str, list[dict[str, float]]] = {}
    for one in measurements:
        rounds = found.setdefault(one["link"], [])
        while len(rounds) <= one["round"]:
            rounds.append({})
        rounds[one["round"]][one["contestant"]] = one["settled"]
    return found


def table(found: Rates) -> str:
    """Markdown: batches per second, and what "auto" reaches of others. Links on which it misses an aim come first."""
    names = list(next(iter(found.values()))[0])
    head = f"| link | {' | '.join(names)} | auto / all local | auto / best fixed |"
    lines = sorted(
        ((_behind(rounds), _row(link, rounds)) for link, rounds in found.items()), key=lambda one: not one[0]
    )
    return "\n".join([head, "|---" * (len(names) + 3) + "|", *(line for _, line in lines)])


LEAST_OF_LOCAL, LEAST_OF_BEST = 0.95, 0.9
"""The aims: never slower than all workers local by more than 5 %, and 90 % of the best fixed split."""


def _behind(rounds: Sequence[Mapping[str, float]]) -> bool:
    of_local, of_best = (statistics.median(ratios) for ratios in _ratios(rounds))
    return of_local < LEAST_OF_LOCAL or of_best < LEAST_OF_BEST


def _ratios(rounds: Sequence[Mapping[str, float]]) -> tuple[list[float], list[float]]:
    best = _best(rounds)
    of_local, of_best = ([one[AUTO] / one[other] for one in rounds] for other in (LOCAL, best))
    return of_local, of_best


def _best(rounds: Sequence[Mapping[str, float]]) -> str:
    return max((name for name in rounds[0] if name != AUTO), key=lambda name: _median(rounds, name))


def _median(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    return statistics.median(one[name] for one in rounds)


def _row(link: str, rounds: Sequence[Mapping[str, float]]) -> str:
    of_local, of_best = _ratios(rounds)
    shown = " | ".join(f"{_median(rounds, name):.1f}" for name in rounds[0])
    return f"| {link} | {shown} | {_spread(of_local)} | {_spread(of_best)} ({_best(rounds)}) |"


def _spread(ratios: Sequence[float]) -> str:
    middle = statistics.median(ratios)
    return f"{middle:.2f}" if len(ratios) == 1 else f"{middle:.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


# -- kept runs ---------------------------------------------------------------------------------------------------------


def problems(run: Mapping[str, Any]) -> list[str]:
    """What speaks against quoting a run."""
    found = [] if run["commit"] and not run["dirty"] else ["it was not measured on a commit without changes"]
    few = [link for link, rounds in rates(run["measurements"]).items() if len(rounds) < QUOTED_ROUNDS]
    return found + [f"{link} has fewer rounds than {QUOTED_ROUNDS}" for link in few]


def newest() -> dict[str, Any] | None:
    """The kept run that ended last; None if there is none."""
    found: list[dict[str, Any]] = [
        json.loads(path.read_text()) for path in KEPT.glob("*.json") if not path.name.startswith("local-")
    ]
    return max(found, key=lambda run: str(run["until"]), default=None)


def _origin(run: Mapping[str, Any]) -> str:
    rounds = len(next(iter(rates(run["measurements"]).values())))
    machine = run["machine"]
    return (
        f"Batches per second once settled, medians of {rounds} rounds; the ratios are taken within a round (range). "
        f"{machine['processor']}, {machine['cores']} cores, {machine['system']}; commit {run['commit'][:10]}, "
        f"{run['until'][:10]}."
    )


BLOCKS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "links": lambda run: table(rates(run["measurements"])),
    "links-origin": _origin,
}


def block(name: str) -> str:
    """The text of a block. Raises ValueError without a kept run to make it of."""
    run = newest()
    if run is None:
        raise ValueError(f"the block {name!r} has no kept run to be made of: see benchmarks/README.md")
    return BLOCKS[name](run)
