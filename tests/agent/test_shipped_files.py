"""What was shipped to a node stays until something newer is, in whatever order the calls are carried out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from dpex.pools.agent.shipped_file import ShippedFiles, map_shipped


def parts(text: bytes) -> list[np.ndarray]:
    return [np.frombuffer(text, np.uint8)]


def read(path: str) -> bytes:
    with Path(path).open("rb") as file:
        return bytes(map_shipped(file.fileno())[0])


@pytest.fixture
def files() -> ShippedFiles:
    return ShippedFiles()


def test_forgetting_that_comes_late_leaves_the_newer_one(files: ShippedFiles) -> None:
    """The newer file may even have the number that the older one's descriptor had."""
    files.expect(0)
    files.put(0, parts(b"first"))
    files.expect(1)
    path = files.put(1, parts(b"second"))
    files.expect(0 + 1)
    assert files.put(0, parts(b"first")) == "", "its bytes were fetched for longer"
    assert read(path) == b"second"
    files.expect(2)


def test_what_was_forgotten_before_it_came_is_not_kept(files: ShippedFiles) -> None:
    files.expect(0)
    files.expect(1)
    before = set(Path("/proc/self/fd").iterdir())
    assert files.put(0, parts(b"first")) == ""
    assert set(Path("/proc/self/fd").iterdir()) == before
