"""Which module may import which, read from the source; and what importing dpex must not do, tried in a new process."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "dpex"
LAYERS = (
    *("_torch", "_ray", "errors", "core", "measure", "stats", "system", "transport", "profile", "autotune", "options"),
    *("worker", "feed", "pools", "testing", "engine", "diagnose", "telemetry", "iterators", "loader", "dataloader"),
    *("integrations", "accelerate", "lightning", "ray_train", "transformers", "dropin", "cli"),
)
"""Folders and modules of the package; each imports from itself and from those before it."""
ABOVE_ALL = {"__init__", "__main__"}
MOST_AT_THE_TOP = 10
"""Python files beside the folders."""
PURE = {
    "dpex.core.sample_policy": set(),
    "dpex.core.schedule": set(),
    "dpex.core.seeding": set(),
    "dpex.core.placement": set(),
    "dpex.core.prefetch": set(),
    "dpex.stats": set(),
    "dpex.pools.share.cache": set(),
    "dpex.pools.agent.compression_rule": set(),
    "dpex.core.names": set(),
    "dpex.core.readable": set(),
    "dpex.core.streams": {"logging"},
    **{f"dpex.core.{name}": set() for name in ("events", "instructions", "engine_state", "worker_life")},
    **{f"dpex.core.{name}": set() for name in ("assignment", "dispatch", "late_tickets", "scaling", "failures")},
    "dpex.measure.seqlock": {"time"},
    **{f"dpex.core.{name}": set() for name in ("logical_log", "resume_point")},
    "dpex.options": set(),
    "dpex.dropin.options": set(),
    "dpex.autotune.forecast": set(),
    "dpex.profile.spans": set(),
    "dpex.errors": set(),
    "dpex.measure.wait_causes": set(),
    "dpex.measure.consumer_time": set(),
    "dpex.measure.sampling": {"random"},
    "dpex.measure.samples": set(),
    "dpex.measure.record": set(),
    "dpex.measure.sums": {"random"},
    "dpex.measure.ledger": {"threading"},
    "dpex.system.gpu.stall": {"logging"},
    "dpex.feed.ahead": set(),
    "dpex.autotune.ceiling": set(),
    "dpex.autotune.checked": set(),
    "dpex.autotune.correlation": {"random"},
    "dpex.autotune.wording": set(),
    "dpex.autotune.config": set(),
    "dpex.autotune.limits": set(),
    "dpex.autotune.model": {"random"},
    **{f"dpex.autotune.constants.{name}": set() for name in ("groups", "judging", "learning", "levels", "measuring")},
    **{f"dpex.autotune.constants.{name}": set() for name in ("planning", "trying", "worker_count")},
    **{f"dpex.autotune.policies.{name}": set() for name in ("base", "explore", "grow", "in_process", "prefetch")},
    **{f"dpex.autotune.policies.{name}": set() for name in ("shrink", "straggler", "undo", "walls")},
    **{f"dpex.autotune.{name}": set() for name in ("constants", "policies", "controller", "manager", "situation")},
    **{f"dpex.autotune.{name}": set() for name in ("outlook", "planner", "trials", "evaluation", "window_record")},
    "dpex.autotune.way_back": set(),
    "dpex.autotune.failed_changes": set(),
    "dpex.autotune.felt": set(),
    "dpex.autotune.rank_load": set(),
    "dpex.core.fair_shares": set(),
    "dpex.core.rank_shares": set(),
    "dpex.measure.gpu_use": set(),
    "dpex.diagnose.device": set(),
    "dpex.autotune.trace.explain": set(),
    "dpex.autotune.course": set(),
    "dpex.autotune.trace.story": set(),
    "dpex.core.svg": set(),
    "dpex.autotune.link": set(),
    "dpex.autotune.noise": set(),
    "dpex.autotune.queueing": set(),
    "dpex.autotune.trace.format": set(),
    "dpex.autotune.types": set(),
    "dpex.autotune.estimator": set(),
    "dpex.diagnose.facts": set(),
    "dpex.diagnose.attribution": set(),
    "dpex.diagnose.html": set(),
    "dpex.diagnose.report": set(),
    "dpex.diagnose.verdict": set(),
    **{f"dpex.diagnose.{name}": set() for name in ("candidates", "measured_work")},
    "dpex.diagnose.what_if": {"random"},
    "dpex.dropin.stock.projection": set(),
    **{f"dpex.telemetry.{name}": set() for name in ("catalog", "gpu_catalog", "metric")},
    "dpex.telemetry.labels": set(),
    "dpex.telemetry.markdown": {"sys"},
    "dpex.system.clock": {"time"},
    "dpex.system.cpus": {"os", "pathlib"},
    "dpex.pools.local.packing": set(),
}
"""Modules without torch, and what of the standard library's outside world each may touch."""
OUTSIDE_WORLD = {
    *("asyncio", "ctypes", "fcntl", "glob", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "random"),
    *("select", "shutil", "signal", "socket", "subprocess", "sys", "tempfile", "threading", "time", "uuid"),
}
MAY_IMPORT_RAY = {
    *(f"dpex.pools.ray.{name}" for name in ("cluster", "deaths", "guardian", "pool", "reservations", "room", "tunnel")),
    *("dpex._ray", "dpex.ray_train", "dpex.telemetry.ray_metrics"),
}


class Import(NamedTuple):
    """One import: the module, the line, and whether it happens when the importing module is loaded."""

    target: str
    line: int
    at_load: bool


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def imports(module: str) -> tuple[Import, ...]:
    return tuple(_imports_of(ast.parse(modules()[module].read_text()), at_load=True))


def _imports_of(node: ast.AST, *, at_load: bool) -> Iterator[Import]:
    """Imports that can happen (those for type checkers cannot), `import_module("name")` and `import_ray` among them."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for otherwise in child.orelse:
                yield from _imports_of(otherwise, at_load=at_load)
            continue
        yield from _imported_by(child, at_load)
        inside = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        yield from _imports_of(child, at_load=at_load and not inside)


def _imported_by(node: ast.AST, at_load: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        yield from (Import(alias.name, node.lineno, at_load) for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        assert node.level == 0, f"line {node.lineno}: relative imports hide where they lead"
        for alias in node.names:
            submodule = f"{node.module}.{alias.name}"
            yield Import(submodule if submodule in modules() else node.module or "", node.lineno, at_load)
    elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(("import_module", "import_ray")):
        for argument in node.args[:1] or [ast.Constant("ray")]:
            if isinstance(argument, ast.Constant):
                yield Import(str(argument.value), node.lineno, at_load)


def own_imports(module: str) -> list[Import]:
    return [found for found in imports(module) if found.target in modules()]


def layer(module: str) -> int | None:
    """The place of a module's folder among `LAYERS`; None for the package itself, which stands above them."""
    parts = module.split(".")
    if len(parts) == 1 or parts[1] in ABOVE_ALL:
        return None
    assert parts[1] in LAYERS, f"{module} belongs to no layer: enter its folder in LAYERS"
    return LAYERS.index(parts[1])


# -- the source --------------------------------------------------------------------------------------------------------


def test_the_reader_of_imports_sees_what_it_should() -> None:
    source = "\n".join(
        (
            "import ray.data, os",
            "from dpex.core import schedule",
            "from dpex.errors import DpexError",
            "def late():",
            "    import_module('ray')",
            "    from dpex.worker.core import WorkerCore",
            "if TYPE_CHECKING:",
            "    import torch",
        )
    )
    found = list(_imports_of(ast.parse(source), at_load=True))
    targets = ["ray.data", "os", "dpex.core.schedule", "dpex.errors", "ray", "dpex.worker.core"]
    assert [f.target for f in found] == targets
    assert [f.at_load for f in found] == [True] * 4 + [False] * 2


@pytest.mark.parametrize("module", modules())
def test_imports_point_downwards(module: str) -> None:
    own = layer(module)
    if own is None:
        return
    upwards = [
        f"{modules()[module].name}:{found.line} imports {found.target}"
        for found in own_imports(module)
        if (other := layer(found.target)) is not None and other > own
    ]
    assert upwards == []


def test_each_layer_is_there_and_few_files_lie_beside_the_folders() -> None:
    found = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py"}
    folders = {path.parent.relative_to(PACKAGE).parts[0] for path in PACKAGE.glob("*/**/*.py")}
    assert (found - ABOVE_ALL) | folders == set(LAYERS)
    assert len(found) <= MOST_AT_THE_TOP


def test_no_circles() -> None:
    """Not even by an import inside a function."""
    left = {module: {found.target for found in own_imports(module)} - {module} for module in modules()}
    while free := [module for module, targets in left.items() if not targets & left.keys()]:
        for module in free:
            del left[module]
    assert left == {}


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_use_the_standard_library_and_each_other(module: str) -> None:
    foreign = [
        found
        for found in imports(module)
        if found.target not in PURE and found.target.split(".")[0] not in sys.stdlib_module_names
    ]
    assert foreign == []


@pytest.mark.parametrize("module", PURE)
def test_pure_modules_do_not_touch_the_outside_world(module: str) -> None:
    touched = {found.target.split(".")[0] for found in imports(module)} & OUTSIDE_WORLD
    assert touched <= PURE[module]
    names = {node.id for node in ast.walk(ast.parse(modules()[module].read_text())) if isinstance(node, ast.Name)}
    assert names.isdisjoint({"open", "print", "input", "exec", "eval", "__import__"})


def test_only_the_pool_of_the_cluster_imports_ray() -> None:
    places = {module for module in modules() for found in imports(module) if found.target.split(".")[0] == "ray"}
    assert places <= MAY_IMPORT_RAY | {"dpex.transport.pickling"}  # for Ray's cloudpickle


def test_what_is_not_in_the_wheel_is_not_imported() -> None:
    foreign = {"benchmarks", "tests", "examples"}
    assert {found.target.split(".")[0] for module in modules() for found in imports(module)}.isdisjoint(foreign)


def test_nobody_imports_ray_when_loaded() -> None:
    early = [
        (module, found.line)
        for module in modules()
        for found in imports(module)
        if found.at_load and found.target.split(".")[0] in ("ray", "prometheus_client")
    ]
    assert early == []


# -- a new process -----------------------------------------------------------------------------------------------------

REPORT = """
import json, logging, os, sys, threading
before = set(os.listdir('/proc/self/fd')), logging.root.handlers[:], list(threading.enumerate())
{statement}
print(json.dumps({{
    "modules": sorted({{name.split('.')[0] for name in sys.modules}}),
    "threads": [t.name for t in threading.enumerate() if t not in before[2]],
    "tasks": len(os.listdir('/proc/self/task')),
    "descriptors": len(set(os.listdir('/proc/self/fd')) - before[0]),
    "handlers": len(logging.root.handlers) + len(logging.getLogger('dpex').handlers),
    "children": open('/proc/self/task/%d/children' % os.getpid()).read().split(),
}}))
"""


@cache
def after(statement: str) -> dict[str, list[str] | int]:
    """What a new interpreter looks like once it has run ``statement``."""
    done = subprocess.run(
        [sys.executable, "-c", REPORT.format(statement=statement)],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    return json.loads(done.stdout)  # type: ignore[no-any-return]


def loaded(statement: str) -> set[str]:
    return set(after(statement)["modules"])  # type: ignore[arg-type]


IMPORT = "import dpex"
IMPORT_PURE = f"import {', '.join(PURE)}"
IMPORT_LOADER = "from dpex.dataloader import DpexDataLoader; DpexDataLoader([1, 2], num_workers='auto')"


def test_importing_dpex_imports_nothing_heavy() -> None:
    assert loaded(IMPORT).isdisjoint({"torch", "numpy", "ray", "prometheus_client", "pynvml", "psutil", "rich"})


def test_the_terminal_page_needs_no_torch() -> None:
    assert loaded("import dpex.cli.main; dpex.cli.main.parser()").isdisjoint(
        {"torch", "numpy", "ray", "prometheus_client"}
    )


def test_pure_modules_run_without_torch() -> None:
    assert loaded(IMPORT_PURE).isdisjoint({"torch", "numpy", "ray", "prometheus_client"})


def test_a_loader_is_made_without_ray() -> None:
    assert loaded(IMPORT_LOADER).isdisjoint({"ray", "prometheus_client"})


@pytest.mark.parametrize("statement", [IMPORT, IMPORT_PURE])
def test_importing_starts_nothing(statement: str) -> None:
    state = after(statement)
    assert (state["threads"], state["tasks"]) == ([], 1)
    assert (state["descriptors"], state["handlers"], state["children"]) == (0, 0, [])


def test_making_a_loader_starts_nothing() -> None:
    """Tasks and descriptors are left out: torch's libraries bring their own."""
    state = after(IMPORT_LOADER)
    assert (state["threads"], state["handlers"], state["children"]) == ([], 0, [])
