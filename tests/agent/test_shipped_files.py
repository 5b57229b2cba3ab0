"""What was shipped to a node stays until it is forgotten, in whatever order the calls are carried out."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from dpex.pools.ray.guardians import local_class
from dpex.transport.memory import map_parts


def parts(*texts: bytes) -> list[list[np.ndarray]]:
    return [[np.frombuffer(text, np.uint8) for text in texts]]


def read(path: str) -> list[bytes]:
    with Path(path).open("rb") as file:
        return [bytes(part) for part in map_parts(file.fileno())]


@pytest.fixture
def node(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setitem(sys.modules, "ray", SimpleNamespace(get=lambda ref: ref))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return local_class()()


def test_what_was_opened_outlives_the_shipment(node: Any) -> None:
    path = node.ship(0, parts(b"first", b"its buffer"))
    assert read(path) == [b"first", b"its buffer"]
    with Path(path).open("rb") as opened:
        node.unship(0)
        assert not Path(path).exists()
        assert bytes(map_parts(opened.fileno())[0]) == b"first"


def test_forgetting_that_comes_late_leaves_the_newer_one(node: Any) -> None:
    node.ship(0, parts(b"first"))
    path = node.ship(1, parts(b"second"))
    node.unship(0)
    assert read(path) == [b"second"]
    node.unship(1)


def test_what_was_forgotten_before_it_came_is_not_kept(node: Any) -> None:
    node.unship(0)
    before = set(Path("/proc/self/fd").iterdir())
    assert node.ship(0, parts(b"first")) == ""
    assert set(Path("/proc/self/fd").iterdir()) == before
