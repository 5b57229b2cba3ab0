"""`head_address` names the cluster that a loader uses. Another cluster than the connected one is an error."""

import importlib
import os
import re
import socket
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from shared_ray import SharedRay, started
from torch.utils.data import TensorDataset

from dpex import DpexDataLoader
from dpex.errors import ClusterError
from dpex.pools.ray.cluster import connect, release

pytestmark = pytest.mark.ray

DATA = TensorDataset(torch.arange(32))


def loader(head_address: str, **options: Any) -> DpexDataLoader[Any]:
    options = {"batch_size": 4, "num_workers": 1, "distribute_mode": True, **options}
    return DpexDataLoader(DATA, head_address=head_address, **options)


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, and at which no process listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


@pytest.mark.parametrize("mode", [True, "auto"])
@pytest.mark.parametrize("workers", [1, "auto"])
def test_address_without_cluster_is_refused(shared_ray: SharedRay, closed_port: int, mode: Any, workers: Any) -> None:
    given = f"127.0.0.1:{closed_port}"
    with (
        loader(given, num_workers=workers, distribute_mode=mode) as made,
        pytest.raises(
            ClusterError, match=f"head_address='{given}'.*connected to.* {shared_ray.address}, and at {given}"
        ),
    ):
        iter(made)


def test_unknown_host_is_refused(shared_ray: SharedRay) -> None:
    with pytest.raises(
        ClusterError, match=f"head_address='no.invalid:6379'.* {shared_ray.address}, .*no Ray head answers"
    ):
        connect("no.invalid:6379")


def test_second_loader_does_not_land_on_the_first_cluster(shared_ray: SharedRay) -> None:
    other = started({"num_cpus": 1}, ())
    try:
        with loader(shared_ray.address) as first:
            assert len(list(first)) == 8
        text = f"head_address='{other.address}'.* {shared_ray.address}, which is another cluster.*ray.shutdown"
        with loader(other.address) as second, pytest.raises(ClusterError, match=text):
            iter(second)
    finally:
        other.shutdown()


@pytest.mark.usefixtures("shared_ray")
def test_private_ray_beside_a_cluster_is_refused() -> None:
    with pytest.raises(ClusterError, match=r"head_address='local'.*which is not a private Ray of this process"):
        connect("local")


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "own name"])
def test_other_names_of_the_cluster_are_accepted(shared_ray: SharedRay, host: str) -> None:
    port = shared_ray.address.rpartition(":")[2]
    cluster = connect(f"{socket.gethostname() if host == 'own name' else host}:{port}")
    assert cluster is shared_ray.share
    release(cluster)


def test_auto_mode_connects_to_the_named_cluster(shared_ray: SharedRay) -> None:
    shared_ray.leave()
    with loader(shared_ray.address, distribute_mode="auto") as made:
        assert len(list(made)) == 8
        assert made.stats().pools["remote"].wanted == 1
    importlib.import_module("ray").shutdown()


def test_auto_mode_warns_and_stays_local(ray_of_session: SharedRay, closed_port: int) -> None:
    ray_of_session.leave()
    given = f"127.0.0.1:{closed_port}"
    with loader(given, distribute_mode="auto") as made:
        text = f"distribute_mode='auto': head_address='{re.escape(given)}': nothing answers there.*Local workers"
        with pytest.warns(RuntimeWarning, match=text):
            assert len(list(made)) == 8
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert len(list(made)) == 8
        assert "remote" not in made.stats().pools


TOKEN = "0123456789abcdef" * 4
HEAD = """
import sys
from shared_ray import started
cluster = started({"num_cpus": 0}, ())
print("at", cluster.address, flush=True)
sys.stdin.read()
cluster.shutdown()
"""
CLIENT = """
import sys
from dpex.pools.ray.cluster import connect
try:
    print("connected to", connect(sys.argv[1]).session)
except Exception as error:
    print(type(error).__name__, error)
"""


def test_a_cluster_that_asks_for_a_token_says_so() -> None:
    """Ray itself tries for 20 s, and then says that it cannot connect. A process has one token, so each has its own."""
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    plain = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")} | {"PYTHONPATH": paths}
    with_token = {**plain, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HEAD], env=with_token, **pipes) as head:
        address = next(line for line in head.stdout if line.startswith("at ")).split()[1]
        clients = [
            subprocess.Popen([sys.executable, "-c", CLIENT, address], env=environment, **pipes)
            for environment in ({**plain, "RAY_AUTH_MODE": "disabled"}, with_token)
        ]
        refused, admitted = [client.communicate()[0] for client in clients]
        head.stdin.close()
    assert f"ClusterError head_address='{address}': the cluster asks for a token" in refused
    assert "RAY_AUTH_TOKEN_PATH. Ray says: RPC error: InvalidAuthToken" in refused
    assert "ray start" not in refused
    assert f"connected to {address}" in admitted
