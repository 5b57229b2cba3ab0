"""What importing dpex and making a plain loader must not do, looked at in new processes: each module costs start-up
time. `lint-imports` checks which module imports which."""

import json
from functools import cache
from pathlib import Path

import pytest
from programs import ran

ROOT = Path(__file__).parents[2]
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
    return json.loads(ran("-c", REPORT.format(statement=statement)).stdout)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("statement", "heavy"),
    [
        (IMPORT, {"torch", "numpy", "ray", "prometheus_client", "pynvml", "psutil", "rich"}),
        (COMMAND, {"torch", "numpy", "ray", "prometheus_client"}),
        (LOADER, {"ray", "prometheus_client", "psutil", "statistics"}),
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


FOR_THE_CLASS = (
    *("dpex", "dpex.dataloader", "dpex.errors", "dpex.hints", "dpex.options", "dpex._torch", "dpex.version"),
    *("dpex.schedule", "dpex.schedule.names"),
    *("dpex.schedule.sample_policy", "dpex.schedule.seeding"),
    *("dpex.system", "dpex.system.compiler", "dpex.system.cpus"),
    *("dpex.system.ray_package", "dpex.system.user_warnings"),
    *("dpex.autotune", "dpex.autotune.config", "dpex.diagnose"),
    *("dpex.loader", "dpex.loader.base_loader", "dpex.loader.checks", "dpex.loader.passes", "dpex.loader.sizing"),
    *("dpex.loader.streams", "dpex.loader.unused"),
    *("dpex.measure", "dpex.measure.readable", "dpex.measure.settings"),
)
"""All that ``from dpex import DpexDataLoader`` may load."""
FOR_AN_EPOCH = (
    *("dpex.schedule.*", "dpex.engine.*", "dpex.measure.*", "dpex.profile.*", "dpex.system.*", "dpex.transport.*"),
    *("dpex.worker.*", "dpex.stats"),
    "dpex.loader.runtime",
    *("dpex.pools", "dpex.pools.base", "dpex.pools.factory", "dpex.pools.local.*"),
)
"""What making the loader and one epoch with two local workers may load beside that; ``*``: all of a package."""
FOR_OTHER_LOADERS = {
    *("dpex.worker.async_dataset", "dpex.worker.async_loop", "dpex.worker.async_samples"),
    *("dpex.pools.local.async_worker", "dpex.engine.in_process", "dpex.transport.frames"),
    *("dpex.system.directories", "dpex.system.gpu.nvml"),
}
"""Modules of these packages that a plain loader has no use for."""
FOREIGN = {
    *("ray", "prometheus_client", "rich", "psutil", "pynvml", "cloudpickle", "pandas"),
    *("asyncio", "html", "http.server", "ssl", "statistics", "urllib.request", "torch.distributed", "torch._dynamo"),
}
"""Packages and modules that dpex uses elsewhere, or that are slow to load."""

SCRIPT = """
import json, sys
import torch, torch.utils.data

def of_dpex():
    return sorted(name for name in sys.modules if name.split(".")[0] == "dpex")

class Dataset(torch.utils.data.Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return of_dpex()

torchs = set(sys.modules)
from dpex import DpexDataLoader
imported = of_dpex()
loader = DpexDataLoader(Dataset(), batch_size=2, num_workers={workers}, collate_fn=list, multiprocessing_context="fork")
made = of_dpex()
in_workers = {{name for batch in loader for names in batch for name in names}}
print(json.dumps({{
    "imported": imported,
    "made": made,
    "after an epoch": of_dpex(),
    "in workers": sorted(in_workers),
    "foreign": sorted(name for name in set(sys.modules) - torchs if name.split(".")[0] != "dpex"),
}}))
"""


@cache
def loaded(workers: str = "2") -> dict[str, list[str]]:
    """Names of modules in a new process and in its workers, at several moments."""
    return json.loads(ran("-c", SCRIPT.format(workers=workers)).stdout)  # type: ignore[no-any-return]


def is_listed(module: str, allowed: tuple[str, ...]) -> bool:
    """Return True if ``module`` is one of these, or belongs to a package of which all is allowed."""
    return any(f"{module}.".startswith(entry.removesuffix("*")) for entry in allowed if entry.endswith(".*")) or (
        module in allowed
    )


def test_importing_the_loader_loads_the_listed_modules_alone() -> None:
    assert [name for name in loaded()["imported"] if name not in FOR_THE_CLASS] == []


def test_a_loader_with_two_workers_imports_only_listed_modules() -> None:
    found = loaded()["after an epoch"]
    assert "dpex.pools.local.pool" in found
    assert [name for name in found if not is_listed(name, FOR_THE_CLASS + FOR_AN_EPOCH)] == []
    assert [name for name in found if name in FOR_OTHER_LOADERS] == []


@pytest.mark.parametrize("workers", ["2", "'auto'"])
def test_an_epoch_imports_no_module_in_the_training_process(workers: str) -> None:
    """The first batch would wait for each such module."""
    assert loaded(workers)["after an epoch"] == loaded(workers)["made"]


def test_no_slow_package_is_loaded_for_such_a_loader() -> None:
    """Modules that ``import torch`` has loaded cost nothing more."""
    found = loaded()["foreign"]
    assert [name for name in found if {name, name.split(".")[0]} & FOREIGN] == []


def test_workers_import_nothing_beyond_the_fork_servers_modules() -> None:
    """A module that a worker loads after the fork is loaded once for each worker."""
    in_workers = loaded()["in workers"]
    assert "dpex.worker.core" in in_workers
    assert [name for name in in_workers if name not in loaded()["after an epoch"]] == []
