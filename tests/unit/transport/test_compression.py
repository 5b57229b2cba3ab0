"""Buffers are compressed and come back bit for bit, or not at all: never beyond their memory."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpex.transport.frames import SMALLEST_BYTES, Compressed, CompressionError, compress, decompress

GUARD = 64
DATA = np.random.default_rng(0).integers(0, 4, 800_017, np.uint8).tobytes()


def compressed(data: bytes) -> bytes:
    found = compress(data)
    assert isinstance(found, Compressed)
    return bytes(found.data)


def taken(data: bytes, nbytes: int) -> bytes:
    """Decompress into a memory of ``nbytes``, with others behind it that must stay as they are."""
    memory = bytearray(b"\xa5" * (nbytes + GUARD))
    try:
        decompress(data, memoryview(memory)[:nbytes])
    finally:
        assert memory[nbytes:] == b"\xa5" * GUARD
    return bytes(memory[:nbytes])


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(min_size=1, max_size=50), st.integers(1, 20_000)), min_size=1, max_size=8))
def test_what_is_compressed_comes_back(parts: list[tuple[bytes, int]]) -> None:
    data = bytes(SMALLEST_BYTES) + b"".join(part * times for part, times in parts)
    assert taken(compressed(data), len(data)) == data


@pytest.mark.parametrize("data", [bytes(SMALLEST_BYTES - 1), np.random.default_rng(0).bytes(500_005), b""])
def test_small_buffers_and_noise_stay_as_they_are(data: bytes) -> None:
    assert compress(data) is data


@pytest.mark.parametrize("difference", [-len(DATA) + 1, -1, 1, 1000])
def test_another_length_than_was_said(difference: int) -> None:
    with pytest.raises(CompressionError, match=f"not one of {len(DATA) + difference} bytes"):
        taken(compressed(DATA), len(DATA) + difference)


@pytest.mark.parametrize("cut", [0, 1, 10, 1000, 100_000])
def test_a_part_of_a_buffer_is_found(cut: int) -> None:
    with pytest.raises(CompressionError):
        taken(compressed(DATA)[:cut], len(DATA))


def test_bytes_behind_a_buffer_are_found() -> None:
    with pytest.raises(CompressionError):
        taken(2 * compressed(DATA), len(DATA))


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
