"""The server that local workers are forked from under Ray, with a real cluster whose workers deliver meanwhile."""

import os
import signal
from itertools import islice
from typing import Any

import pytest
import torch
from families import Augmented, assert_same, seeded, stacked, worker_pids
from inspection import pool_of
from pools.test_clean_start import BROKEN, SHAPE, no_server, server_pid  # noqa: F401

from dpex import DpexDataLoader
from dpex.pools.local import clean_server

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("shared_ray")]


def remote(length: int) -> DpexDataLoader[torch.Tensor]:
    return DpexDataLoader(Augmented(length, 0.004), generator=seeded(), distribute_mode=True, **SHAPE)


def test_remote_workers_deliver_until_a_local_worker_is_up() -> None:
    """The server is held up until 30 batches have come since the resize."""
    with remote(6000) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        loader.resize(local=2)
        os.kill(server_pid(), signal.SIGSTOP)
        got += [next(iterator) for _ in range(30)]
        pool = loader.stats().pools["local"]
        assert (pool.wanted, pool.requested, pool.running, pool.tickets) == (2, 2, 0, 0)
        os.kill(server_pid(), signal.SIGCONT)
        while loader.stats().pools["local"].tickets == 0:  # bounded by the length of the dataset
            got.append(next(iterator))
        assert len(worker_pids(iterator, 2)) == 2
        got += [next(iterator) for _ in range(10)]
    rest = DpexDataLoader(Augmented(6000), generator=seeded(), **{**SHAPE, "num_workers": 0})
    assert_same(torch.cat(got), stacked(islice(rest, len(got))))


def until_no_local_worker_can_be_started(iterator: Any) -> list[torch.Tensor]:
    """Return the batches until then; the length of the dataset bounds it."""
    got = []
    while (local := pool_of(iterator, "local")) is None or local.failed is None:
        got.append(next(iterator))
    return got


@pytest.mark.parametrize("how", BROKEN)
def test_a_failure_to_start_is_a_warning_beside_remote_workers(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with remote(6000) as loader:
        iterator = iter(loader)
        got = [next(iterator)]
        monkeypatch.setattr(clean_server.spawn, "get_executable", lambda: BROKEN[how])
        loader.resize(local=2)
        with pytest.warns(RuntimeWarning, match="no local worker can be started.*(exit code 1|No such file)"):
            got += until_no_local_worker_can_be_started(iterator)
        pool = loader.stats().pools["local"]
        assert (pool.wanted, pool.requested, pool.running) == (2, 0, 0)
        assert "no local worker can be started" in pool_of(iterator, "local").failed
        got += [next(iterator) for _ in range(10)]
    rest = DpexDataLoader(Augmented(6000), generator=seeded(), **{**SHAPE, "num_workers": 0})
    assert_same(torch.cat(got), stacked(islice(rest, len(got))))
