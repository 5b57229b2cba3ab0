"""Local workers where Ray is connected: they come from a clean server, for whose start nobody waits."""

import gc
import os
import signal
from collections.abc import Iterator
from typing import Any

import psutil
import pytest
import torch
from families import Augmented, Of, assert_same, kill, seeded, stacked
from inspection import pool_of
from waiting import until

from dpex import DpexDataLoader, WorkerDiedError
from dpex.loader import checks
from dpex.pools.local import clean_server

SHAPE: dict[str, Any] = {"batch_size": 4, "shuffle": True, "num_workers": 2, "seeding": "batch"}
BROKEN = {"ends at once": "/bin/false", "does not exist": "/nowhere/python"}


@pytest.fixture(autouse=True, scope="module")
def server_ends() -> Iterator[None]:
    """A server takes seconds to start, and some tests use it one after the other."""
    yield
    end_server()


@pytest.fixture
def kept_server() -> None:
    """Lets a test use the server that another one has left."""


@pytest.fixture(autouse=True)
def no_server(request: pytest.FixtureRequest) -> None:
    """All other tests begin without a clean server."""
    if "kept_server" not in request.fixturenames:
        end_server()


def end_server() -> None:
    server, clean_server._server = clean_server._server, None
    if server is not None:
        server._process.kill()
        server._finalizer()


def server_pid() -> int:
    assert clean_server._server is not None
    return clean_server._server._process.pid


def stop_server() -> None:
    """Stop the server, after starting one where there is none. What is asked of it now lies in its socket, as while it
    starts."""
    clean_server.start_early(None)
    pid = server_pid()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)


def let_server_go_on() -> None:
    os.kill(server_pid(), signal.SIGCONT)


def made_here(length: int = 400, nap_s: float = 0.0) -> torch.Tensor:
    return stacked(DpexDataLoader(Augmented(length, nap_s), generator=seeded(), **{**SHAPE, "num_workers": 0}))


# -- on its own: dpex is told that Ray is connected --------------------------------------------------------------------


@pytest.fixture
def seems_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clean_server, "is_ray_connected", lambda: True)


def local(length: int = 400, **options: Any) -> DpexDataLoader[torch.Tensor]:
    return DpexDataLoader(Augmented(length, 0.001), generator=seeded(), **{**SHAPE, **options})


@pytest.fixture
def ray_seems_up(seems_connected: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The loader is told so, too."""
    monkeypatch.setattr(checks, "is_ray_connected", lambda: True)


@pytest.mark.usefixtures("kept_server", "seems_connected")
def test_iter_does_not_wait_and_the_promised_workers_count() -> None:
    with local() as loader:
        stop_server()
        iterator = iter(loader)
        pool = loader.stats().pools["local"]
        assert (pool.wanted, pool.requested, pool.running) == (2, 2, 0)
        for size in (1, 5, 3):
            loader.resize(local=size)
            assert loader.stats().pools["local"].requested == size
        let_server_go_on()
        assert_same(stacked(iterator), made_here())


@pytest.mark.usefixtures("kept_server", "seems_connected")
def test_the_clean_server_serves_all_epochs_and_is_replaced() -> None:
    with local(seeding="worker") as loader:
        first = stacked(loader)
        server = server_pid()
        assert not torch.equal(first, stacked(loader))
        assert server_pid() == server
        kill(server)
        assert len(list(loader)) == 100
        assert server_pid() != server


@pytest.mark.usefixtures("ray_seems_up")
def test_the_clean_server_starts_with_the_loader_and_is_shared() -> None:
    with local(seeding="worker") as loader:
        early = server_pid()
        with local(seeding="worker"):
            assert server_pid() == early
        assert len(list(loader)) == 100
        assert server_pid() == early
        kill(early)
        clean_server._server._process.wait()  # type: ignore[union-attr]
        with local():
            assert server_pid() != early


@pytest.mark.usefixtures("ray_seems_up")
@pytest.mark.parametrize(
    "options", [{"num_workers": 0}, {"distribute_mode": True}, {"multiprocessing_context": "spawn"}]
)
def test_loaders_that_do_not_need_the_server_start_none(options: dict[str, Any]) -> None:
    local(**options)
    assert clean_server._server is None


def variable_at(index: int) -> int:
    """Sample: an environment variable, as a number."""
    return int(os.environ["DPEX_TEST_VARIABLE"])


@pytest.mark.usefixtures("kept_server", "ray_seems_up")
def test_workers_have_the_environment_of_the_training_at_iter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DPEX_TEST_VARIABLE", "1")
    with DpexDataLoader(Of(variable_at, 2), num_workers=1) as loader:
        monkeypatch.setenv("DPEX_TEST_VARIABLE", "2")
        assert [int(batch) for batch in loader] == [2, 2]


@pytest.mark.usefixtures("seems_connected")
def test_closing_while_the_server_starts_leaves_the_server_alone() -> None:
    stop_server()
    before = set(psutil.Process().children(recursive=True)), psutil.Process().num_fds()
    with local() as loader:
        iterator = iter(loader)
        loader.resize(local=4)
    let_server_go_on()
    until(lambda: set(psutil.Process().children(recursive=True)) == before[0])
    with pytest.raises(RuntimeError, match="closed"):
        next(iterator)
    del iterator
    gc.collect()
    assert psutil.Process().num_fds() <= before[1]  # fewer, where a test before had left something to the collector


def iter_with(executable: str, loader: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An iterator whose clean server was started with that program."""
    with monkeypatch.context() as patch:
        patch.setattr(clean_server.spawn, "get_executable", lambda: executable)
        iterator = iter(loader)
        pool = pool_of(iterator, "local")
        until(lambda: pool.poll() is not None and pool.failed)
    return iterator


@pytest.mark.usefixtures("seems_connected")
@pytest.mark.filterwarnings("ignore:no local worker can be started")
def test_a_failed_start_of_all_workers_raises_and_resize_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    for executable in BROKEN.values():
        loader = local()
        iterator = iter_with(executable, loader, monkeypatch)
        with pytest.raises(WorkerDiedError, match="no local worker can be started"):
            next(iterator)
    with loader:
        loader.resize(local=3)
        assert_same(torch.cat([*iterator]), made_here())
