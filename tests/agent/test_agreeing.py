"""Whether compressed buffers are asked for, and what is said where Zstandard is missing at one end."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from local_nodes import make_pool
from torch.utils.data import Dataset
from waiting import until

from dpex import DpexDataLoader
from dpex.loader.runtime import LoaderRuntime
from dpex.pools.agent import agreeing
from dpex.pools.agent.agreeing import SWITCH, order_for, told_by
from dpex.pools.agent.link import AgentLink
from dpex.pools.agent.shipped import PoolOrder
from dpex.pools.factory import PoolFactory
from dpex.transport.compression import can_compress

ORDER = (True, "path", "float32", None)


@pytest.fixture(autouse=True)
def nothing_was_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "_said", set())
    monkeypatch.delenv(SWITCH, raising=False)


def is_missing_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreeing, "can_compress", lambda: False)


@pytest.fixture(params=[False, True], ids=["own connection", "through Ray"])
def link(request: pytest.FixtureRequest) -> Iterator[AgentLink]:
    ours, theirs = socket.socketpair()
    made = AgentLink(ours, bytearray, lambda: None, is_tunnel=request.param)
    yield made
    theirs.close()
    until(lambda: made.ended)


def test_compressed_buffers_are_asked_for_on_a_connection_of_its_own(link: AgentLink) -> None:
    assert PoolOrder(*order_for(link, ORDER)).decompresses == (not link.is_tunnel)


def test_without_zstandard_the_order_is_what_it_always_was(link: AgentLink, monkeypatch: pytest.MonkeyPatch) -> None:
    is_missing_here(monkeypatch)
    assert order_for(link, ORDER) == ORDER


def test_it_can_be_switched_off(link: AgentLink, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SWITCH, "0")
    assert order_for(link, ORDER) == ORDER
    assert told_by("a", is_installed_there=True) is None


def test_what_is_missing_on_a_node_is_said_once() -> None:
    text = told_by("a", is_installed_there=False)
    assert text is not None
    assert text.startswith("zstandard is not installed on node a: batches come from there uncompressed (pip install")
    assert told_by("b", is_installed_there=False) is None


def test_what_is_missing_here_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    is_missing_here(monkeypatch)
    text = told_by("a", is_installed_there=True)
    assert text is not None
    assert text.startswith("zstandard is not installed on this machine, though it is on node a: batches come")
    assert told_by("b", is_installed_there=True) is None


class Ones(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((200, 200), float(index))


@pytest.mark.timeout(240)
@pytest.mark.parametrize("where", ["there", pytest.param("here", marks=pytest.mark.long)])
def test_batches_come_without_it_from_two_agents_and_that_is_logged_once(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if where == "here":
        is_missing_here(monkeypatch)
    else:
        assert can_compress()
        (tmp_path / "zstandard.py").write_text("raise ImportError('not installed')\n")
        monkeypatch.syspath_prepend(tmp_path)  # agents look where this process does, which has looked already

    local = PoolFactory.__call__

    def make(self: PoolFactory, name: str, count: int, setup: Any, shared_queue: bool) -> Any:
        if name != "remote":
            return local(self, name, count, setup, shared_queue)
        return make_pool(setup, shared_queue, count, [1, 1], far=[0, 1])

    monkeypatch.setattr(PoolFactory, "__call__", make)
    monkeypatch.setattr(LoaderRuntime, "hold_cluster", lambda self, head_address: None)
    options: dict[str, Any] = {"batch_size": 4, "seeding": "batch"}
    with (
        caplog.at_level(logging.INFO, "dpex"),
        DpexDataLoader(Ones(), num_workers=2, distribute_mode=True, **options) as loader,
    ):
        iterator: Any = iter(loader)
        numbers = iter(range(1_000_000))

        def come_from_both() -> bool:
            assert torch.equal(next(iterator)[:, 0, 0], torch.arange(4.0) + 4 * next(numbers))
            return iterator._engine.pool("remote").counts.running == 2

        until(come_from_both)
        list(islice(iterator, 20))
    said = [record.message for record in caplog.records if "zstandard" in record.message]
    assert len(said) == 1
    assert ("on this machine" in said[0]) == (where == "here")
