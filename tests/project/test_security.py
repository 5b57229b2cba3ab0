"""What docs/explanation/security.md says of listening and of states holds."""

import base64
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import kept, leaves
from families import Of

from dpex import DpexDataLoader, MetricsConfig, StateError
from dpex.options import WorkerConfig
from dpex.pools.ray import cluster

LISTENS = "0A"
LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 as the kernel writes them."""
pytestmark = pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="asks Linux who listens where")


def numbers_at(index: int) -> Any:
    return index, torch.rand(())


def listening(pids: list[int]) -> list[str]:
    """Local addresses at which these processes listen for TCP, in the kernel's words."""
    inodes = {inode for pid in pids for inode in _sockets(pid)}
    lines = [line.split() for name in ("tcp", "tcp6") for line in _lines(Path("/proc/net") / name)]
    return [words[1].partition(":")[0] for words in lines if words[3] == LISTENS and words[9] in inodes]


def _lines(path: Path) -> list[str]:
    return path.read_text().splitlines()[1:] if path.exists() else []


def _sockets(pid: int) -> Iterator[str]:
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(link.readlink())
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield target[8:-1]


@pytest.mark.parametrize(
    ("metrics", "addresses"), [(None, 0), (MetricsConfig(), 1)], ids=["workers alone", "with metrics"]
)
def test_nothing_listens_beyond_this_machine(metrics: MetricsConfig | None, addresses: int, tmp_path: Path) -> None:
    mine = set(listening([os.getpid()]))
    with DpexDataLoader(Of(numbers_at, 12), num_workers=2, metrics_config=metrics) as loader:
        batches = iter(loader)
        next(batches)
        found = listening([os.getpid(), *(worker.pid for worker in batches._workers if worker.pid)])
        assert set(found) - mine <= LOOPBACK
        assert len([address for address in found if address in LOOPBACK]) >= addresses


def test_agents_of_a_private_ray_connect_by_loopback_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    monkeypatch.setattr(cluster, "_current", cluster.Cluster("a session", private=True))
    assert cluster.trainer_address() == "127.0.0.1"


class Bomb:
    """Unpickling it makes a folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def with_bombs(state: Any, bomb: bytes) -> Iterator[Any]:
    """Copies of a state, each with this pickle in place of one of its strings and tensors; and one with it in all."""
    forms = {str: base64.b64encode(bomb).decode(), torch.Tensor: torch.frombuffer(bytearray(bomb), dtype=torch.uint8)}
    found = {path: forms[type(leaf)] for path, leaf in leaves(state).items() if type(leaf) in forms}
    for chosen in (*([path] for path in found), found):
        copy = kept(state)
        for path in chosen:
            inside = copy
            for key in path[:-1]:
                inside = inside[key]
            inside[path[-1]] = found[path]
        yield copy


def test_a_state_runs_no_code(tmp_path: Path) -> None:
    """Wherever in it a pickle is hidden: the state is refused."""
    exploded = tmp_path / "exploded"
    bomb = pickle.dumps(Bomb(exploded))

    def loader() -> DpexDataLoader[Any]:
        return DpexDataLoader(
            Of(numbers_at, 12), shuffle=True, num_workers=1, worker_config=WorkerConfig(snapshot_every_n_steps=1)
        )

    with loader() as first:
        batches = iter(first)
        next(batches), next(batches)
        state = kept(first.state_dict())
    copies = list(with_bombs(state, bomb))
    assert len(copies) > 5
    for copy in copies:
        with pytest.raises(StateError):
            loader().load_state_dict(copy)
    assert not exploded.exists()
