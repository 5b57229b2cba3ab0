"""Datasets that a node cannot open: local workers take over, or the epoch ends with an error that has the remedy."""

import errno
import importlib.util
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Of
from pool_driver import NodeBound

from dpex import DpexDataLoader, WorkerDiedError
from dpex.options import ClusterConfig

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]
PLUGIN = "newcomers_plugin"


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function of a module that no other process can import: its file is on no path, as of some plugin loaders."""
    path = tmp_path / f"{PLUGIN}.py"
    path.write_text("def prepare(index): return index")
    spec = importlib.util.spec_from_file_location(PLUGIN, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, PLUGIN, module)
    spec.loader.exec_module(module)
    return module.prepare


def on_bare_node(dataset: Any, **options: Any) -> DpexDataLoader[Any]:
    """A loader with one worker, whose remote workers are on the node that calls itself "bare"."""
    where: Any = {"cluster_config": ClusterConfig(ray_remote_args={"num_cpus": 0, "resources": {"aside": 1}})}
    return DpexDataLoader(dataset, batch_size=4, num_workers=1, seeding="batch", **where, **options)


@pytest.fixture
def caught() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def telling(caught: list[warnings.WarningMessage], what: str) -> list[str]:
    return [str(one.message) for one in caught if what in str(one.message)]


def test_workers_that_can_start_nowhere_are_an_error(prepare: Any, caught: list[warnings.WarningMessage]) -> None:
    """The local ones that take over lack the module, too. Training waited for ever."""
    with on_bare_node(Of(prepare, 32), distribute_mode=True) as loader, pytest.raises(WorkerDiedError) as raised:
        list(loader)
    for part in (PLUGIN, "node ", "runtime_env", "no local worker can be started"):
        assert part in str(raised.value)
    (told,) = telling(caught, "remote worker") + telling(caught, "cluster")
    assert "local workers take over" in told
    assert PLUGIN in told


class Sample(NodeBound):
    """Its module is missing on the node "bare" only. Sample: its index."""

    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class NoRoom(Sample):
    """On the node "bare", a limit on processes is reached after the process that tests sample 0."""

    def __setstate__(self, state: Any) -> None:
        fork = os.fork

        def limited() -> int:
            os.fork = refused
            return fork()

        def refused() -> int:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

        if os.environ.get("DPEX_TEST_NODE") == "bare":
            os.fork = limited


@pytest.mark.filterwarnings("ignore:.*Could not start all:RuntimeWarning")
@pytest.mark.parametrize(
    ("dataset", "why", "resized"),
    [(Sample, "rare_codec", False), (Sample, "rare_codec", True), (NoRoom, "no worker can be started there", False)],
    ids=["from the start", "in mid-epoch", "no process"],
)
def test_one_warning_tells_that_local_workers_take_over_and_why(
    caught: list[warnings.WarningMessage], dataset: Any, why: str, resized: bool
) -> None:
    with on_bare_node(dataset(), distribute_mode=not resized) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        if resized:
            loader.resize(local=0, remote=1)
        got += iterator
    assert torch.equal(torch.cat(got), torch.arange(32))
    (told,) = telling(caught, why)
    for part in ("no remote worker is left, so local workers take over", "node ", "runtime_env"):
        assert part in told
