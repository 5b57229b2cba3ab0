"""How pytest-xdist shares the modules among its processes (`-n 3 --dist loadfile`, as `python -m tests` has it)."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RAY = "Ray"
RAY_PROCESSES = 2
"""Tests with Ray wait for half of their time: one process of them is at it when all others have long been done."""


@cache
def starts_ray(module: str) -> bool:
    """Whether a module, a path from the root, has tests that start Ray."""
    return "pytest.mark.ray" in (ROOT / module).read_text()


@cache
def ray_scopes(processes: int) -> dict[str, str]:
    """The scope of each module that starts Ray: as many scopes as that, of about as much source each."""
    modules = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    sizes = {module: (ROOT / module).stat().st_size for module in modules if starts_ray(module)}
    load = {f"{RAY} {number}": 0 for number in range(processes)}
    scopes = {}
    for module in sorted(sizes, key=lambda module: (-sizes[module], module)):
        scopes[module] = min(load, key=lambda scope: load[scope])
        load[scopes[module]] += sizes[module]
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
    """Let modules that take long come first where processes share them, as one at the end keeps the others waiting."""
    if not hasattr(config, "workerinput"):
        return
    tests = Counter(item.path for item in items)
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    ray = {item.path for item in items if item.get_closest_marker("ray")}
    items.sort(key=lambda item: (item.path not in ray, item.path not in slow, -tests[item.path], item.path))
