"""What importing dpex must not do, looked at in a new process. `lint-imports` checks which module imports which."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
REPORT = """
import json, logging, os, sys, threading
before = set(os.listdir('/proc/self/fd')), list(threading.enumerate())
{statement}
print(json.dumps({{
    "modules": sorted({{name.split('.')[0] for name in sys.modules}}),
    "threads": [t.name for t in threading.enumerate() if t not in before[1]],
    "tasks": len(os.listdir('/proc/self/task')),
    "descriptors": len(set(os.listdir('/proc/self/fd')) - before[0]),
    "handlers": len(logging.root.handlers) + len(logging.getLogger('dpex').handlers),
    "children": open('/proc/self/task/%d/children' % os.getpid()).read().split(),
}}))
"""
IMPORT = "import dpex"
COMMAND = "import dpex.cli.main; dpex.cli.main.parser()"
LOADER = "from dpex.dataloader import DpexDataLoader; DpexDataLoader([1, 2], num_workers='auto')"


@cache
def after(statement: str) -> dict[str, list[str] | int]:
    """Describe a new interpreter once it has run ``statement``."""
    command = [sys.executable, "-c", REPORT.format(statement=statement)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, timeout=60)
    return json.loads(done.stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        (IMPORT, {"torch", "numpy", "ray", "prometheus_client", "pynvml", "psutil", "rich"}),
        (COMMAND, {"torch", "numpy", "ray", "prometheus_client"}),
        (LOADER, {"ray", "prometheus_client"}),
    ],
    ids=["import", "command", "loader"],
)
def test_heavy_packages_are_imported_where_they_are_used(statement: str, heavy: set[str]) -> None:
    assert heavy.isdisjoint(after(statement)["modules"])  # type: ignore[arg-type]


def test_importing_starts_nothing() -> None:
    state = after(IMPORT)
    assert (state["threads"], state["tasks"]) == ([], 1)
    assert (state["descriptors"], state["handlers"], state["children"]) == (0, 0, [])


def test_making_a_loader_starts_nothing() -> None:
    """Tasks and descriptors are left out: torch's libraries bring their own."""
    state = after(LOADER)
    assert (state["threads"], state["handlers"], state["children"]) == ([], 0, [])
