"""An address at which no Ray cluster answers is an error within seconds, as Ray itself tries for minutes."""

import socket
from collections.abc import Iterator

import pytest
from packages import need

from dpex.errors import ClusterError
from dpex.pools.ray import cluster
from dpex.pools.ray.cluster import connect

need("ray", "needs Ray: pip install 'dpex[ray]'")


@pytest.fixture
def closed_port() -> Iterator[int]:
    """A port that is taken, and at which nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def test_an_address_at_which_nothing_answers(closed_port: int) -> None:
    address = f"127.0.0.1:{closed_port}"
    with pytest.raises(ClusterError, match=f"head_address='{address}': nothing answers there .*; start a Ray cluster"):
        connect(address)


def test_an_address_of_the_environment(closed_port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", f"127.0.0.1:{closed_port}")
    with pytest.raises(ClusterError, match=f"RAY_ADDRESS='127.0.0.1:{closed_port}': nothing answers there"):
        connect("auto")


@pytest.mark.parametrize(("tls", "is_client", "text"), [("0", True, "ray://"), ("1", False, "RAY_USE_TLS")])
def test_a_connection_that_agents_cannot_use_is_refused(
    monkeypatch: pytest.MonkeyPatch, tls: str, is_client: bool, text: str
) -> None:
    monkeypatch.setenv("RAY_USE_TLS", tls)
    monkeypatch.setattr(cluster, "is_ray_connected", lambda: True)
    monkeypatch.setattr(cluster, "is_client", lambda: is_client)
    with pytest.raises(ClusterError, match=rf"{text}.* give distribute_mode=False"):
        connect("auto")
