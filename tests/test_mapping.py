"""Maps of shared memory: where huge pages fit, filled, and gone with their last view."""

from __future__ import annotations

import ctypes
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dpex.transport import mapping
from dpex.transport.mapping import map_memory, populate

HUGE = mapping._HUGE_BYTES or 2 << 20
SIZE = 2 * HUGE + 12_345
"""Two huge pages, and what does not fill a third."""


@pytest.fixture
def file() -> Iterator[int]:
    fd = os.memfd_create("test")
    os.ftruncate(fd, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture(autouse=True)
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever became of earlier maps, huge pages are asked for, and patiently."""
    monkeypatch.setattr(mapping, "_gives_huge_pages", True)
    monkeypatch.setattr(mapping, "_PATIENCE_S_PER_BYTE", 1.0)


def address_space() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    return pages * resource.getpagesize()


def of_map(memory: Any, field: str) -> int:
    """A figure of ``/proc/self/smaps`` about a map, in bytes."""
    begin = f"{ctypes.addressof(memory):x}-"
    lines = iter(Path("/proc/self/smaps").read_text().splitlines())
    assert any(line.startswith(begin) for line in lines)
    found = next(line for line in lines if line.startswith(f"{field}:"))
    return int(found.split()[1]) << 10


def test_it_is_filled_and_both_maps_show_the_same(file: int) -> None:
    maker = map_memory(file, SIZE)
    populate(maker)
    taker = map_memory(file, SIZE)
    assert bytes(maker) == bytes(SIZE)
    assert of_map(maker, "Rss") >= SIZE
    maker[0] = maker[HUGE] = maker[SIZE - 1] = 7
    assert [taker[0], taker[1], taker[HUGE], taker[SIZE - 1]] == [7, 0, 7, 7]


def test_both_sides_have_huge_pages_where_the_kernel_gives_them(file: int) -> None:
    maker, taker = map_memory(file, SIZE), map_memory(file, SIZE)
    populate(maker)
    assert bytes(taker) == bytes(SIZE)
    huge = 2 * HUGE if mapping._gives_huge_pages and mapping._HUGE_BYTES else 0
    assert (of_map(maker, "ShmemPmdMapped"), of_map(taker, "ShmemPmdMapped")) == (huge, huge)


def test_a_kernel_that_takes_its_time_is_not_asked_again(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_HUGE_BYTES", HUGE)
    monkeypatch.setattr(mapping, "_PATIENCE_S_PER_BYTE", -1.0)
    memory = map_memory(file, SIZE)
    populate(memory)
    assert not mapping._gives_huge_pages
    assert of_map(memory, "Rss") >= SIZE
    monkeypatch.setattr(mapping, "_collapse", None)
    populate(memory)


def test_small_pages_serve_where_there_are_no_huge_ones(file: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mapping, "_HUGE_BYTES", 0)
    memory = map_memory(file, SIZE)
    populate(memory)
    assert of_map(memory, "Rss") >= SIZE
    assert bytes(memory) == bytes(SIZE)


def test_nothing_is_left_of_a_map_when_its_last_view_is_gone(file: int) -> None:
    before = address_space()
    memory = map_memory(file, SIZE)
    view = memoryview(memory).cast("B")[HUGE:]
    del memory
    assert address_space() >= before + SIZE
    assert view[0] == 0
    del view
    assert address_space() < before + SIZE // 2


def test_nothing_is_left_of_a_map_that_cannot_be_had(file: int) -> None:
    reading = os.open(f"/proc/self/fd/{file}", os.O_RDONLY)
    before = address_space()
    with pytest.raises(OSError, match=f"cannot map {SIZE} bytes"):
        map_memory(reading, SIZE)
    assert address_space() < before + SIZE // 2
    os.close(reading)
