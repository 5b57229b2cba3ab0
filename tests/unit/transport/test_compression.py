"""Buffers are compressed and come back bit for bit, or not at all: never beyond their memory."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpex.transport.compression import (
    PIECE_BYTES,
    READ_BYTES,
    SMALLEST_BYTES,
    Compressed,
    CompressionError,
    Compressor,
    can_compress,
    decompress,
)

GUARD = 64
DATA = np.random.default_rng(0).integers(0, 4, 3 * PIECE_BYTES + 17, np.uint8).tobytes()


def compressed(data: bytes) -> bytes:
    found = Compressor(lambda: None).compress(data)
    assert isinstance(found, Compressed)
    return b"".join(found.pieces)


def taken(data: bytes, nbytes: int, length: int | None = None) -> bytes | None:
    """What becomes of the data in a memory of so many bytes, with others behind it that must stay as they are."""
    memory = bytearray(b"\xa5" * (nbytes + GUARD))
    source = io.BytesIO(data)
    try:
        is_whole = decompress(source.read, len(data) if length is None else length, memoryview(memory)[:nbytes])
    finally:
        assert memory[nbytes:] == b"\xa5" * GUARD
    return bytes(memory[:nbytes]) if is_whole else None


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.integers(1, 20_000)), min_size=1, max_size=8))
def test_what_is_compressed_comes_back(parts: list[tuple[bytes, int]]) -> None:
    data = bytes(SMALLEST_BYTES) + b"".join(part * times for part, times in parts)
    assert taken(compressed(data), len(data)) == data


@pytest.mark.parametrize("data", [DATA, bytes(20 << 20), bytes(SMALLEST_BYTES)])
def test_large_buffers_come_back(data: bytes) -> None:
    assert taken(compressed(data), len(data)) == data


@pytest.mark.parametrize("data", [bytes(SMALLEST_BYTES - 1), np.random.default_rng(0).bytes(2 * READ_BYTES + 5), b""])
def test_small_buffers_and_noise_stay_as_they_are(data: bytes) -> None:
    assert Compressor(lambda: None).compress(data) is data


def test_something_else_may_be_done_between_pieces() -> None:
    calls: list[int] = []
    found = Compressor(lambda: calls.append(1)).compress(DATA)
    assert len(calls) == 4
    assert found.nbytes == len(DATA)


@pytest.mark.parametrize("difference", [-len(DATA) + 1, -1, 1, 1000])
def test_another_length_than_was_said(difference: int) -> None:
    with pytest.raises(CompressionError, match=f"not one of {len(DATA) + difference} bytes"):
        taken(compressed(DATA), len(DATA) + difference)


@pytest.mark.parametrize("missing", [1000, 100_000])
def test_a_length_that_is_too_short_is_found(missing: int) -> None:
    data = compressed(DATA)
    with pytest.raises(CompressionError):
        taken(data, len(DATA), len(data) - missing)


def test_a_length_that_is_too_long_is_found() -> None:
    data = compressed(DATA)
    with pytest.raises(CompressionError):
        taken(2 * data, len(DATA), 2 * len(data))


def test_nothing_is_read_beyond_the_length() -> None:
    data = compressed(DATA)
    source = io.BytesIO(data + b"what follows")
    assert decompress(source.read, len(data), memoryview(bytearray(len(DATA))))
    assert source.read() == b"what follows"


@settings(deadline=None)
@given(st.data())
def test_what_is_damaged_is_found(data: st.DataObject) -> None:
    damaged = bytearray(compressed(DATA))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = taken(bytes(damaged), len(DATA))
    except CompressionError:
        return
    assert found == DATA  # a bit that says nothing


@settings(deadline=None)
@given(st.binary(min_size=1, max_size=300), st.integers(1, 5000))
def test_anything_may_come(data: bytes, nbytes: int) -> None:
    with pytest.raises(CompressionError):
        taken(data, nbytes)


@pytest.mark.parametrize("cut", [0, 1, 10, 100_000])
def test_the_end_of_a_connection_is_no_damage(cut: int) -> None:
    data = compressed(DATA)
    assert taken(data[:cut], len(DATA), len(data)) is None


def test_it_is_installed_where_dpex_is_developed() -> None:
    assert can_compress()
