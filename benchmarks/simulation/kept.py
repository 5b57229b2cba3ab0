"""The best fixed settings of the scenarios, kept in a file a set, as searching for them takes minutes.

An entry is used only while its key fits: a hash of the world, of the intervals, and of the code of simulator and
search. A test plays some of the kept settings again, and wants their rates to the last digit.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
from collections.abc import Sequence
from functools import cache, partial
from multiprocessing import Pool
from pathlib import Path
from typing import Any

from benchmarks.simulation import oracle
from benchmarks.simulation.oracle import Static, Truth
from benchmarks.simulation.scenarios import FOLDER, ORACLE, Scenario
from dpex.measure.settings import KNOBS, Settings

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "dpex-simulation"
"""Truths that were searched, for all checkouts of a user; the names of the files are their keys."""
REFRESH = "python -m benchmarks.simulation --refresh"
_SOURCES = (
    *("event_loop.py", "world.py", "draws.py", "history.py", "steering.py", "rank.py", "simulator.py", "oracle.py"),
    "gpu.py",
)


class StaleOracleError(RuntimeError):
    """The kept results are not of this simulator and this scenario; the message says what to run."""


def key(scenario: Scenario) -> str:
    """Hash of what the results depend on."""
    config = scenario.config
    limits = config.min_local, config.max_local, config.min_remote, config.max_remote, config.max_prefetch
    parts = (repr(scenario.world), repr(list(scenario.intervals())), repr(limits), _source())
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@cache
def _source() -> str:
    """The code that the results depend on, without comments, docstrings, imports and layout."""
    return "\n".join(_code(Path(__file__).parent / file) for file in _SOURCES)


def _code(path: Path) -> str:
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
            node.body = [each for each in node.body if not _is_text(each)] or [ast.Pass()]
    return ast.unparse(tree)


def _is_text(node: ast.stmt) -> bool:
    """Return True for the docstring of a module, class, function or constant."""
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def cached(scenario: Scenario, *, with_cheapest: bool = False) -> list[Truth]:
    """The truths of a scenario, searched once for each version of it and of the code."""
    path = CACHE / f"{key(scenario)}{'-cheapest' if with_cheapest else ''}.json"
    if not path.exists():
        found = oracle.truths(scenario, with_cheapest=with_cheapest)
        CACHE.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps([_plain(truth) for truth in found]))
        draft.rename(path)
    return [_truth(interval) for interval in json.loads(path.read_text())]


def truths(of: str, scenario: Scenario) -> list[Truth]:
    """What is kept of a scenario of the set ``of``, interval by interval.

    Raises:
        StaleOracleError: nothing is kept, or the scenario, the simulator or the search has changed since.
    """
    entry = _read(of).get(scenario.name)
    if entry is None or entry["key"] != key(scenario):
        raise StaleOracleError(f"{of}/{ORACLE} knows nothing of {scenario.name!r} as it is now; run {REFRESH}")
    return [_truth(interval) for interval in entry["intervals"]]


def refresh(of: str, scenarios: Sequence[Scenario], known: Sequence[Scenario]) -> list[str]:
    """Search for those not up to date, keep the results, and drop what is not ``known``; the names searched."""
    kept = {s.name: _read(of)[s.name] for s in known if s.name in _read(of)}
    stale = [s for s in scenarios if kept.get(s.name, {}).get("key") != key(s)]
    with Pool() as pool:
        found = pool.map(partial(cached, with_cheapest=True), stale, chunksize=1)
    for scenario, intervals in zip(stale, found, strict=True):
        kept[scenario.name] = {"key": key(scenario), "intervals": [_plain(truth) for truth in intervals]}
    lines = (f"{json.dumps(name)}: {json.dumps(kept[name])}" for name in sorted(kept))
    (FOLDER / of / ORACLE).write_text("{\n" + ",\n".join(lines) + "\n}\n")
    _read.cache_clear()
    return [scenario.name for scenario in stale]


@cache
def _read(of: str) -> dict[str, dict[str, Any]]:
    path = FOLDER / of / ORACLE
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _plain(truth: Truth) -> dict[str, Any]:
    statics = {"best": truth.best, "cheapest": truth.cheapest}
    return {name: _entry(static) for name, static in statics.items()} | {"settled_rate": truth.settled_rate}


def _entry(static: Static) -> dict[str, float]:
    settings = {name: getattr(static.settings, name) for name in KNOBS}
    return settings | {"rate": static.rate, "settled_rate": static.settled_rate}


def _truth(entry: dict[str, Any]) -> Truth:
    return Truth(best=_static(entry["best"]), cheapest=_static(entry["cheapest"]), settled_rate=entry["settled_rate"])


def _static(entry: dict[str, float]) -> Static:
    sizes: dict[str, Any] = {name: int(entry[name]) for name in KNOBS}
    return Static(settings=Settings(**sizes), rate=entry["rate"], settled_rate=entry["settled_rate"])
