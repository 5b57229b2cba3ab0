"""Tables for people: each scenario beside the best fixed setting, sums over a set, and the worst worlds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean, median

from benchmarks.simulation.scenarios import HOLDS
from benchmarks.simulation.score import MOST_DECISIONS, MOST_REGRET, UNBEATEN, Result, Score

_COLUMNS = "{:26} {:28} {:>7} {:>7} {:>7} {:>7} {:>13} {:>4} {:>13} {:>6} {:>4}  {}"
_WORST = 10


def table(results: Sequence[Result]) -> Iterator[str]:
    """Lines for people: one an interval, then totals."""
    heads = ("regret", "settled", "settle", "dec.", "workers/least", "chg/10", "mem")
    yield _COLUMNS.format("scenario", "best static", "rate", "auto", *heads, "missed")
    for result in results:
        for number, score in enumerate(result.scores):
            yield _row(result, score, number)
    yield from _totals(results)


def _row(result: Result, score: Score, number: int) -> str:
    name = result.scenario.name if not number else f"  from {score.start:g} s"
    missed = [hold if hold in result.scenario.holds else f"({hold})" for hold in score.missed()]
    return _COLUMNS.format(
        name,
        str(score.best.settings),
        f"{score.best.rate:.1f}",
        f"{score.rate:.1f}",
        f"{score.regret * 100:.1f} %",
        f"{score.settled_regret * 100:.1f} %",
        f"{score.settle_s:.1f}/{score.settle_allowed_s:.1f} s",
        score.decisions,
        f"{score.workers:.2f}/{score.cheapest.settings.workers}",
        f"{score.changes:.1f}",
        "OVER" if score.over_bytes > 0 else "ok",
        " ".join(missed),
    ).rstrip()


def _totals(results: Sequence[Result]) -> Iterator[str]:
    scores = [score for result in results for score in result.scores]
    met = sum(not result.missed() for result in results)
    yield ""
    yield f"{met} of {len(results)} scenarios met all that they hold to ({len(scores)} intervals)"
    misses = [name for result in results for name in result.missed()]
    held = [name for result in results for name in result.scenario.holds]
    yield "missed: " + ", ".join(f"{name} {misses.count(name)} of {held.count(name)}" for name in HOLDS)
    used, least = sum(s.workers for s in scores), sum(s.cheapest.settings.workers for s in scores)
    yield f"workers: {used:.0f}, {least} would do"


def summary(name: str, results: Sequence[Result]) -> Iterator[str]:
    """Sums over a set of worlds."""
    regrets = [result.regret for result in results]
    above = sum(regret > MOST_REGRET for regret in regrets)
    settled = [result.settled_regret for result in results]
    decisions = [result.decisions for result in results]
    few = sum(number <= MOST_DECISIONS for number in decisions)
    seconds = [result.settle_s for result in results]
    yield f"{name}: {len(results)} worlds"
    yield (
        f"  regret of whole runs: mean {fmean(regrets):.2%}, median {median(regrets):.2%}, worst {max(regrets):.1%}, "
        f"above {MOST_REGRET:.0%}: {above} ({above / len(results):.1%})"
    )
    late = sum(regret > MOST_REGRET for regret in settled)
    yield (
        f"  regret when settled: mean {fmean(settled):.2%}, median {median(settled):.2%}, worst {max(settled):.1%}, "
        f"above {MOST_REGRET:.0%}: {late} ({late / len(results):.1%})"
    )
    yield (
        f"  decisions to settle: mean {fmean(decisions):.1f}, most {max(decisions)}, "
        f"at most {MOST_DECISIONS} in {few / len(results):.1%}"
    )
    yield f"  seconds to settle: mean {fmean(seconds):.1f}, median {median(seconds):.1f}, most {max(seconds):.1f}"
    beyond, errors = [r for r in results if r.beyond], [r for r in results if r.errors]
    yield f"  limits surpassed: {len(beyond)} worlds; exceptions: {len(errors)} worlds"
    for result in (*errors, *beyond):
        yield f"    {result.scenario.name}: {'; '.join((*result.errors, *result.beyond)[:2])}"
    better, missed = [r for r in results if r.gain > UNBEATEN], [r for r in results if r.doubts]
    names = ", ".join(f"{result.scenario.name} {result.gain:.1%}" for result in better)
    yield f"  better than any fixed setting: {len(better)} worlds{': ' if names else ''}{names}"
    for result in missed:
        yield f"  ERROR, the search missed a setting in {result.scenario.name}: {'; '.join(result.doubts)}"


def worst(results: Sequence[Result], again: str) -> Iterator[str]:
    """The worlds with most regret, and how to run each alone: ``again``, then its name."""
    for result in sorted(results, key=lambda result: -result.regret)[:_WORST]:
        scenario, world = result.scenario, result.scenario.world
        pairs = [f"{score.best.settings} ({score.best.rate:.4g}/s, auto {score.rate:.4g}/s)" for score in result.scores]
        yield f"  {result.regret:6.1%}  {again} {scenario.name}"
        yield f"          {scenario.seconds:g} s, {world.cpus:g} CPUs; {scenario.why}"
        yield f"          best: {'; then '.join(pairs)}; {result.decisions} decisions"


def decisions(result: Result) -> Iterator[str]:
    """Lines for people: what was decided, why, and what it brought."""
    for rank, history in enumerate(result.histories):
        who = f"rank {rank} " if len(result.histories) > 1 else ""
        for decision in history.decisions:
            yield f"    {who}{decision.at:7.2f} s  {decision.reason}: {decision.text}"
