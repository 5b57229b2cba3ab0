"""What ``dpex run`` says at the end: a line for each loader that it served.

A loader that is made anew for each pass, with the same kind of dataset, batch size and workers, is one loader here.
Nothing that goes wrong here ends or changes a run, and a process that a signal ends says nothing.
"""

from __future__ import annotations

import atexit
import os
import sys
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from dpex.autotune.types import Decision
from dpex.diagnose.diagnosis import Diagnosis
from dpex.diagnose.source import DiagnosisSource
from dpex.loader.proxies import describe
from dpex.measure.readable import percent, rounded
from dpex.system.cpus import rank

_SHOWN = 6
"""Loaders that get a line each: those in which most time passed."""
_pid = 0


@dataclass(kw_only=True)
class _Served:
    """A loader of the script. given: its number of workers there; served_by: that of its proxy, unless it is tuned.
    first, last: what the first and the latest of its proxies counted."""

    loader: weakref.ref[Any]
    kind: tuple[Any, ...]
    told: str
    given: int
    rank: int
    first: DiagnosisSource
    last: DiagnosisSource
    served_by: int | None = None


_served: list[_Served] = []


def note(loader: Any, given: int, source: DiagnosisSource, torch_rank: int, served_by: int | str | None = None) -> None:
    """An iterator of this loader was made, which the script gives so many workers, and which so many serve."""
    _begin()
    kind = (type(loader.dataset), loader.batch_size, given)
    for served in _served:
        known = served.loader()
        if known is loader or (known is None and served.kind == kind):
            served.loader, served.last = weakref.ref(loader), source
            return
    _served.append(
        _Served(
            loader=weakref.ref(loader),
            kind=kind,
            told=describe(loader),
            given=given,
            rank=max(rank(os.environ), torch_rank),
            first=source,
            last=source,
            served_by=served_by if isinstance(served_by, int) else None,
        )
    )


def _begin() -> None:
    """Have the lines said at the end of this process; a forked one begins anew."""
    global _pid
    if _pid == os.getpid():
        return
    _pid = os.getpid()
    _served.clear()
    from multiprocessing import parent_process, util

    if parent_process() is None:
        atexit.register(say_all)
    else:  # a process of ``multiprocessing`` ends without what others do at their end
        util.Finalize(None, say_all, exitpriority=-100)


def say_all() -> None:
    """Say what was served; once, and only in rank 0."""
    served, _served[:] = list(_served) if _pid == os.getpid() else [], []
    try:
        for line in lines([one for one in served if one.rank == 0]):
            print(f"dpex run: {line}", file=sys.stderr, flush=True)
    except Exception as error:
        print(f"dpex run: nothing is known of the loaders: {type(error).__name__}: {error}", file=sys.stderr)


def lines(served: list[_Served]) -> Iterator[str]:
    """A line for each loader that delivered batches by workers, and one for those that are left out."""
    found = [(one, one.last.diagnose()) for one in served]
    found = sorted((pair for pair in found if pair[1].facts.batches), key=lambda pair: -pair[1].facts.wall_s)
    for one, diagnosis in found[:_SHOWN]:
        yield _line(one, diagnosis)
    if len(found) > _SHOWN:
        yield f"{len(found) - _SHOWN} more loaders were served, in which less time passed"


def _line(served: _Served, diagnosis: Diagnosis) -> str:
    facts = diagnosis.facts
    waited = f"{_wait(served, facts.wait_ratio)}, {rounded(facts.batches / max(1e-9, facts.wall_s))} batches/s"
    if diagnosis.verdict.cause == "too-early":
        waited = f"{facts.batches} batches, too few to say how long training waited"
    return f"{served.told}: {_workers(served)}, {waited}. First: {diagnosis.advice}"


def _workers(served: _Served) -> str:
    given = f"{served.given} worker{'' if served.given == 1 else 's'}"
    tuner = served.last.tuner
    if tuner is None:
        return given if served.served_by in (None, served.given) else f"{given} became {served.served_by}"
    if (tuner.settings.local, tuner.settings.remote) == (served.given, 0):
        return given
    return f"{given} became {tuner.settings}"


def _wait(served: _Served, ratio: float) -> str:
    """The wait, and where decisions were judged, how it began and ended."""
    first, last = _decisions(served.first), _decisions(served.last)
    outcomes = [one.outcome for one in last if one.outcome is not None]
    if not first or not outcomes or "wait" not in first[0].evidence:
        return f"wait {percent(ratio)}"
    before, after = percent(first[0].evidence["wait"]), percent(outcomes[-1].wait)
    if before == after:
        return f"wait {percent(ratio)}"
    return f"wait {percent(ratio)} in all, {before} at first and {after} at the end"


def _decisions(source: DiagnosisSource) -> Sequence[Decision]:
    return [] if source.tuner is None else source.tuner.decisions
