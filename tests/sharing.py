"""How pytest-xdist shares the modules among its processes (`-n 3 --dist loadfile`, as `python -m tests` has it)."""

from __future__ import annotations

import os
import re
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RAY = "Ray"
RAY_PROCESSES = 2
"""Tests with Ray wait for half of their time: one process of them is at it when all others have long been done."""

STARTS_RAY = re.compile(r"pytest\.mark\.ray\b(?!\(elsewhere=True\))")
"""In the source of a module: some of its tests connect their own process."""
SECONDS = {
    "tests/test_ray_pool.py": 520,
    "tests/test_leftovers.py": 270,
    "tests/test_cluster.py": 260,
    "tests/test_examples.py": 150,
    "tests/frameworks/test_ray_train.py": 90,
    "tests/frameworks/test_two_ranks.py": 75,
    "tests/cli/test_diagnose.py": 70,
    "tests/test_clean_start.py": 60,
    "tests/test_ray_heads.py": 60,
    "tests/cli/test_run_training.py": 50,
    "tests/telemetry/test_page.py": 45,
    "tests/agent/test_network.py": 40,
    "tests/agent/test_agent.py": 35,
    "tests/telemetry/test_gpu_export.py": 35,
    "tests/test_clean_start_beside_ray.py": 35,
    "tests/telemetry/test_prometheus.py": 30,
    "tests/test_training_benchmarks.py": 30,
    "tests/test_documents.py": 30,
    "tests/test_elastic_ranks.py": 25,
    "tests/test_benchmarks.py": 25,
    "tests/frameworks/test_kernel.py": 25,
    "tests/parity/test_workers.py": 25,
    "tests/simulation/test_scenarios.py": 25,
    "tests/test_distribution.py": 25,
}
"""How long modules take of which that is more than 20 seconds: seen on 2026-11-22, where four processes had two CPUs.

They begin in this order, as a long one at the end would keep the others waiting."""
OTHER_S = 10.0
"""A module that is not among them, if it starts Ray: that alone takes as long."""


@cache
def starts_ray(module: str) -> bool:
    """Whether a module, a path from the root, has tests that connect their own process to Ray."""
    return STARTS_RAY.search((ROOT / module).read_text()) is not None


def seconds(module: str) -> float:
    """About how long a module with Ray takes."""
    return SECONDS.get(module, OTHER_S)


@cache
def ray_scopes(processes: int) -> dict[str, str]:
    """The scope of each module that starts Ray: as many scopes as that, which take about as long."""
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    load = {f"{RAY} {number}": 0.0 for number in range(processes)}
    scopes = {}
    for module in sorted(filter(starts_ray, modules), key=lambda module: (-seconds(module), module)):
        scopes[module] = min(load, key=lambda scope: load[scope])
        load[scopes[module]] += seconds(module)
    return scopes


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run a module in one process, and all that start Ray in a few which run nothing else.

    Where Ray has been, dpex starts local workers in another way, and handlers of signals and registered classes are
    left behind: what a test sees would depend on which tests came before.
    """
    if config.getoption("dist") != "loadfile":
        return None
    from xdist.scheduler import LoadFileScheduling

    class Sharing(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            module = super()._split_scope(nodeid)
            processes = max(1, min(RAY_PROCESSES, self.numnodes - 1))
            return ray_scopes(processes)[module] if starts_ray(module) else module

        def _assign_work_unit(self, node: Any) -> None:
            super()._assign_work_unit(node)
            if len(self.nodes) > 1 and any(scope.startswith(f"{RAY} ") for scope in self.assigned_work[node]):
                node.shutdown()  # when that is done

    config.option.loadscopereorder = False  # the order is that of `pytest_collection_modifyitems`
    return Sharing(config, log)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Let modules that take long come first where processes share them, and those with Ray before all others."""
    if not hasattr(config, "workerinput"):
        return
    tests = Counter(item.path for item in items)
    module = {path: os.path.relpath(path, ROOT) for path in tests}
    last = {path: not starts_ray(module[path]) for path in tests}
    items.sort(key=lambda item: (last[item.path], -SECONDS.get(module[item.path], 0), -tests[item.path], item.path))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out modules without a test of that kind where only those marked `alone` are to run: imports take long."""
    is_asked = config.option.markexpr == "alone" and collection_path.name.startswith("test_")
    return True if is_asked and "pytest.mark.alone" not in collection_path.read_text() else None
