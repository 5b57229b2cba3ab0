"""Shared-memory slots: lent until both sides have let go, never longer and never shorter."""

import gc
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import descriptors
from forks import in_a_child
from hypothesis import given
from hypothesis import strategies as st

from dpex.transport import arena as arena_module
from dpex.transport.arena import PAGE_BYTES, Arena, Segment, SegmentSpec, SlotRef, open_segment, slot_class

BIG = 100_000


class Taker:
    """The other process's side, in this one: maps what the maker announces."""

    def __init__(self) -> None:
        self.segments: dict[int, Segment] = {}
        self.specs: list[SegmentSpec] = []
        self.fds: list[int] = []

    def announce(self, spec: SegmentSpec, fd: int) -> None:
        self.specs.append(spec)
        self.fds.append(fd)
        self.segments[spec.segment] = open_segment(spec, fd)

    def view(self, ref: SlotRef, nbytes: int) -> np.ndarray[Any, Any]:
        return self.segments[ref.segment].view(ref.slot, nbytes)


@pytest.fixture
def taker() -> Taker:
    return Taker()


@pytest.fixture
def arena(taker: Taker) -> Arena:
    return Arena(taker.announce)


@pytest.fixture(autouse=True)
def _no_cycle_holds_a_slot() -> Iterator[None]:
    """Letting go is reference counting alone: with the collector off a view in a cycle would show."""
    gc.disable()
    yield
    gc.enable()


def place(arena: Arena, value: int, nbytes: int = BIG) -> tuple[np.ndarray[Any, Any], SlotRef]:
    base, ref = arena.array(nbytes)
    base[:] = value
    return base, ref


@given(st.integers(1, 1 << 40))
def test_size_classes_are_whole_pages_with_bounded_waste(nbytes: int) -> None:
    size = slot_class(nbytes)
    assert size >= nbytes
    assert size % PAGE_BYTES == 0
    assert size - nbytes <= max(nbytes // (8 if nbytes < 1 << 20 else 32), PAGE_BYTES - 1)
    assert slot_class(size) == size


def test_a_slot_is_reused_only_when_both_sides_let_go(arena: Arena, taker: Taker) -> None:
    base, ref = place(arena, 1)
    arena.hand_over(ref)
    del base  # before the taker has looked
    others = [place(arena, 2) for _ in range(4)]
    view = taker.view(ref, BIG)
    others += [place(arena, 3) for _ in range(4)]
    assert ref not in [other for _, other in others]
    assert (view == 1).all()
    del view
    assert arena._segments[ref.segment].is_free(ref.slot)
    del others
    slots = sum(spec.slots for spec in taker.specs)
    assert ref in [r for _, r in [place(arena, 4) for _ in range(slots)]]
    assert slots == sum(spec.slots for spec in taker.specs)


def test_steady_traffic_needs_no_new_memory(arena: Arena, taker: Taker) -> None:
    window: list[Any] = []
    sizes = set()
    for number in range(500):
        base, ref = place(arena, number % 256)
        arena.hand_over(ref)
        del base
        window = [*window[-3:], taker.view(ref, BIG)]
        if number > 20:
            sizes.add(arena.nbytes)
    assert len(sizes) == 1
    assert [view[0] for view in window] == [n % 256 for n in range(496, 500)]


@pytest.mark.parametrize(
    "derive",
    [
        lambda base: base[10:20],
        lambda base: memoryview(base)[5:],
        lambda base: torch.from_numpy(base)[3:],
        lambda base: torch.frombuffer(base, dtype=torch.float32).view(5, -1).t(),
        lambda base: torch.frombuffer(base, dtype=torch.int16).untyped_storage(),
    ],
    ids=["slice", "memoryview", "from_numpy", "tensor", "storage"],
)
def test_whatever_views_the_slot_holds_it(arena: Arena, taker: Taker, derive: Any) -> None:
    base, ref = arena.array(BIG)
    arena.hand_over(ref)
    derived = derive(taker.view(ref, BIG))
    del base
    segment = arena._segments[ref.segment]
    assert not segment.is_free(ref.slot)
    del derived
    assert segment.is_free(ref.slot)


def test_views_that_die_in_a_forked_child_free_nothing(arena: Arena, taker: Taker) -> None:
    base, ref = place(arena, 5)
    arena.hand_over(ref)
    held = [base, taker.view(ref, BIG)]
    del base
    in_a_child(held.clear)
    segment = arena._segments[ref.segment]
    assert segment.flags[2 * ref.slot : 2 * ref.slot + 2].tolist() == [1, 1]
    held.clear()
    assert segment.is_free(ref.slot)


def test_no_python_runs_as_a_view_dies(arena: Arena) -> None:
    """A signal handler would run there, and its exception be lost."""
    base, ref = place(arena, 7)
    called: list[str] = []
    sys.setprofile(lambda frame, event, _: called.append(frame.f_code.co_name) if event == "call" else None)
    del base
    sys.setprofile(None)
    assert called == []
    assert arena._segments[ref.segment].is_free(ref.slot)


def test_no_descriptor_stays_open(taker: Taker) -> None:
    before = descriptors()
    arena = Arena(taker.announce)
    held = [place(arena, 1, 1 << 20) for _ in range(20)]
    assert descriptors() - before == set()
    assert len(taker.fds) > 1
    del held


def test_private_memory_is_announced_to_nobody(taker: Taker) -> None:
    before = descriptors()
    arena = Arena(taker.announce, shared=False)
    base, ref = place(arena, 3)
    assert taker.specs == []
    assert descriptors() == before
    del base
    assert arena._segments[ref.segment].is_free(ref.slot)


def test_batches_that_are_kept_take_the_memory_of_their_slots(arena: Arena, taker: Taker) -> None:
    """The slots of a new segment are used before there is a further one."""
    kept = []
    for number in range(3000):
        base, ref = place(arena, number % 256, 2 * PAGE_BYTES)
        arena.hand_over(ref)
        kept.append(taker.view(ref, 2 * PAGE_BYTES))
        del base
    slots = sum(spec.slots for spec in taker.specs)
    assert slots <= 3000 + arena_module._SEGMENT_BYTES // (2 * PAGE_BYTES)
    assert [int(view[0]) for view in kept] == [number % 256 for number in range(3000)]
    del kept[::7]
    again = [place(arena, 2, 2 * PAGE_BYTES) for _ in range(3000 // 7)]  # those that are free among them are found
    assert sum(spec.slots for spec in taker.specs) == slots
    assert len(again) == 3000 // 7


def test_a_slightly_smaller_batch_reuses_a_larger_slot(arena: Arena) -> None:
    """The last batch of an epoch is often shorter."""
    place(arena, 1, BIG)
    place(arena, 1, BIG - BIG // 4)
    assert len(arena._segments) == 1
    place(arena, 1, BIG // 4)
    assert len(arena._segments) == 2


def test_idle_segments_are_given_up_and_told_once(arena: Arena) -> None:
    _, ref = place(arena, 1, 8 << 20)
    nbytes = arena.nbytes
    for _ in range(2 * arena_module._TRIM_EVERY):
        place(arena, 1)
    assert ref.segment not in arena._segments
    assert arena.nbytes < nbytes
    assert arena.retired() == [ref.segment]
    assert arena.retired() == []
    _, again = place(arena, 2, 8 << 20)  # the size can come back
    assert again.segment not in arena.retired()


def test_large_segments_beyond_concurrent_use_are_released(arena: Arena) -> None:
    """As after a moment in which many batches waited."""
    at_once = [place(arena, 1, 4 << 20) for _ in range(9)]
    del at_once
    for _ in range(2 * arena_module._TRIM_EVERY):
        held = place(arena, 1, 4 << 20), place(arena, 2, 4 << 20)
        del held
    assert len(arena._segments) == 2
    assert len(arena.retired()) == 7


@pytest.mark.parametrize("side", ["maker", "taker"])
def test_a_held_segment_is_never_given_up(arena: Arena, taker: Taker, side: str) -> None:
    base, ref = place(arena, 6, 8 << 20)
    held = base
    if side == "taker":
        arena.hand_over(ref)
        held = taker.view(ref, 8 << 20)
    del base
    for _ in range(4 * arena_module._TRIM_EVERY):
        place(arena, 1)
    assert arena.retired() == []
    assert (held == 6).all()
