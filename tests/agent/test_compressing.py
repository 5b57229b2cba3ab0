"""An agent's compressor follows what its connection carries: when it tries buffers, begins and ends."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from dpex.pools.agent.compressing import (
    DECIDE_EVERY_S,
    LEAST_BATCHES,
    LEVELS,
    LONGEST_WINDOW_S,
    LOOK_AGAIN_S,
    MOST_PLACES,
    SMALLEST_BYTES,
    BufferCompressor,
)
from dpex.pools.agent.compression_rule import PAUSE_S, TRIAL_WINDOWS
from dpex.pools.agent.traffic import Traffic
from dpex.transport.compression import Compressed, decompress

SLOW_BYTES_PER_S = 1_000_000
"""So slow that any machine compresses faster."""
FEW = np.random.default_rng(0).integers(0, 4, 1 << 20, np.uint8)
NOISE = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)


class Course:
    """A compressor and its time. ``between``: how often it let something else be done."""

    def __init__(self) -> None:
        self.now, self.between = 100.0, 0
        self.compressor = BufferCompressor(4.0, self._count, lambda: self.now)

    def _count(self) -> None:
        self.between += 1

    def second(self, *, made: float = SLOW_BYTES_PER_S, sent: float = SLOW_BYTES_PER_S, busy: float = 1.0) -> None:
        """So many bytes of batches were made in it, and sent while the way was busy for that share of it."""
        for _ in range(LEAST_BATCHES):
            self.compressor.made(int(made) // LEAST_BATCHES, 0.00025, 0.00025)
        self.now += DECIDE_EVERY_S
        traffic = Traffic(int(sent), 0, busy * DECIDE_EVERY_S, 0.0)
        self.compressor.look(traffic, waiting_bytes=1 if busy > 0.5 else 0, workers=2)


def same(found: Any, buffer: np.ndarray[Any, Any]) -> bool:
    """Whether it becomes the buffer again."""
    into = np.empty(buffer.nbytes, np.uint8)
    assert type(found) is Compressed
    assert found.nbytes == buffer.nbytes
    whole = io.BytesIO(b"".join(found.pieces))
    assert decompress(whole.read, found.travelling_bytes, memoryview(into))
    return into.tobytes() == buffer.tobytes()


def test_nothing_is_compressed_before_the_way_is_known_to_limit() -> None:
    course = Course()
    assert course.compressor.compress(0, FEW) is FEW
    course.second(busy=0.3)
    assert course.compressor.compress(0, FEW) is FEW


def test_where_the_way_limits_what_compresses_is_compressed() -> None:
    course = Course()
    course.second()
    found = course.compressor.compress(0, FEW)
    assert same(found, FEW)
    assert found.travelling_bytes < 0.5 * FEW.nbytes
    assert course.compressor.levels.keys() == {0}
    assert course.between >= 4


@pytest.mark.parametrize("dtype", [np.float32, np.int64])
def test_arrays_of_any_type_and_shape(dtype: Any) -> None:
    course, buffer = Course(), np.zeros((64, 40, 33), dtype)
    buffer[::3] = 7
    course.second()
    assert same(course.compressor.compress(0, buffer), buffer)


def test_noise_is_looked_at_once_in_many() -> None:
    course = Course()
    looks: list[float] = []
    compressed = course.compressor._compressed

    def count(*arguments: Any) -> Any:
        looks.append(course.now)
        return compressed(*arguments)

    course.compressor._compressed = count  # type: ignore[method-assign]
    for _ in range(20):
        course.second()
        for _ in range(10):
            assert course.compressor.compress(0, NOISE) is NOISE
    assert len(looks) == len(LEVELS) * 20 * DECIDE_EVERY_S / LOOK_AGAIN_S


def test_places_of_a_batch_are_told_apart() -> None:
    course = Course()
    course.second()
    assert course.compressor.compress(0, NOISE) is NOISE
    assert same(course.compressor.compress(1, FEW), FEW)
    for number in range(2, 100):
        course.compressor.compress(number, FEW)
    assert course.compressor.levels.keys() == set(range(1, MOST_PLACES))


def test_small_buffers_are_left_alone() -> None:
    course = Course()
    course.second()
    small = FEW[: SMALLEST_BYTES - 1]
    assert course.compressor.compress(0, small) is small
    assert same(course.compressor.compress(0, FEW[:SMALLEST_BYTES]), FEW[:SMALLEST_BYTES])


def test_it_ends_when_the_way_carries_all_by_itself() -> None:
    course = Course()
    course.second()
    course.compressor.compress(0, FEW)
    for _ in range(2 * TRIAL_WINDOWS):
        course.second(made=4 * SLOW_BYTES_PER_S)
        assert course.compressor.levels
    course.second(made=0.2 * SLOW_BYTES_PER_S, sent=0.05 * SLOW_BYTES_PER_S, busy=0.05)
    assert not course.compressor.levels
    assert course.compressor.compress(0, FEW) is FEW


def test_it_ends_when_what_comes_does_not_compress_any_more() -> None:
    course = Course()
    course.second()
    assert same(course.compressor.compress(0, FEW), FEW)
    for _ in range(2):
        assert course.compressor.compress(0, NOISE) is NOISE
    assert not course.compressor.levels
    course.second()
    assert course.compressor.compress(0, FEW) is FEW
    for _ in range(int(LOOK_AGAIN_S / DECIDE_EVERY_S)):
        course.second()
    assert same(course.compressor.compress(0, FEW), FEW)


def test_it_ends_when_no_more_batches_come_than_without_it() -> None:
    """Whatever takes their time: the way is as full as before, though less travels for each batch."""
    course = Course()
    course.second()
    for _ in range(TRIAL_WINDOWS):
        assert same(course.compressor.compress(0, FEW), FEW)
        course.second()
    assert not course.compressor.levels
    for _ in range(int(PAUSE_S / DECIDE_EVERY_S)):
        assert course.compressor.compress(0, FEW) is FEW
        course.second()
    assert same(course.compressor.compress(0, FEW), FEW)


def test_large_batches_on_a_slow_way_are_counted_over_a_longer_time() -> None:
    """One in two seconds keeps the way full, though none comes in every other second; then larger ones travel."""
    course = Course()
    for number in range(100):
        has_begun = number > 2 * LEAST_BATCHES
        if number % 2:
            course.compressor.made((3 if has_begun else 2) * SLOW_BYTES_PER_S, 0.001, 0.001)
            assert (course.compressor.compress(0, FEW) is not FEW) == has_begun
        course.now += 1.0
        part = 0.5 if has_begun else 1.0
        course.compressor.look(Traffic(int(part * SLOW_BYTES_PER_S), 0, part, 0.0), waiting_bytes=1, workers=2)


def test_when_no_batches_come_it_ends() -> None:
    course = Course()
    course.second()
    course.compressor.compress(0, FEW)
    course.now += LONGEST_WINDOW_S
    course.compressor.look(Traffic(0, 0, 0.0, 0.0), waiting_bytes=0, workers=2)
    assert not course.compressor.levels


def test_a_thread_that_waits_for_a_cpu_compresses_slowly() -> None:
    """Ten milliseconds for every look at the watch: a byte takes longer than the way takes for it."""
    course, looks = Course(), iter(range(1000))
    course.compressor._stopwatch = lambda: 0.01 * next(looks)
    course.second(made=100 * SLOW_BYTES_PER_S, sent=100 * SLOW_BYTES_PER_S)
    assert course.compressor.compress(0, FEW) is FEW


def test_a_way_of_which_nothing_is_known_is_left_alone() -> None:
    course = Course()
    for _ in range(3):
        course.second(sent=0, busy=0.0)
        assert course.compressor.compress(0, FEW) is FEW
