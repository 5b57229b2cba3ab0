"""Slots that the device reads by itself: locked once, unlocked before they are unmapped, and copied once."""

import gc
from typing import Any

import pytest
import torch
from async_device import CUDA, AsyncDevice
from families import Augmented, seeded
from inspection import feed_of

from dpex import DpexDataLoader
from dpex.device import devices
from dpex.device.devices import QueueDevice, Staging, opened
from dpex.transport.arena import Arena, memory_behind


def staging_of(gpu: AsyncDevice) -> Staging:
    device = opened(CUDA)
    assert isinstance(device, QueueDevice)
    return Staging(device)


def test_a_segment_is_locked_once_and_unlocked_before_unmapping(gpu: AsyncDevice) -> None:
    stage, arena = staging_of(gpu), Arena(shared=False)
    tensors = [arena.tensor((1000,), torch.float32) for _ in range(2)]
    assert [stage(tensor) is tensor for tensor in tensors] == [True, True]
    view = tensors[0][10:].view(-1, 2)
    assert stage(view) is view
    memory = memory_behind(view)
    assert memory is not None
    assert list(gpu.runtime.locked.values()) == [len(memory)]
    del memory, view, tensors, arena
    gc.collect()
    assert gpu.runtime.locked == {}
    assert devices._locked == {}
    assert stage.staged_bytes == 0


@pytest.mark.parametrize("tensor", [torch.arange(4), torch.eye(3).to_sparse(), torch.empty(0)], ids=str)
def test_other_memory_is_copied(gpu: AsyncDevice, tensor: torch.Tensor) -> None:
    assert staging_of(gpu)(tensor) is not tensor
    assert gpu.runtime.locked == {}
    assert gpu.pinned == 1


def test_memory_that_cannot_be_locked_is_copied_without_retries(gpu: AsyncDevice) -> None:
    gpu.runtime.answer = 801
    stage, arena = staging_of(gpu), Arena(shared=False)
    tensor = arena.tensor((1000,), torch.float32)
    assert stage(tensor) is not tensor
    gpu.runtime.answer = 0
    other = arena.tensor((100_000,), torch.float32)
    assert stage(other) is not other
    assert stage.staged_bytes == 404_000
    assert gpu.runtime.locked == {}


def run(**options: Any) -> tuple[torch.Tensor, Any]:
    loader = DpexDataLoader(
        Augmented(200, extra=2000), batch_size=4, num_workers=2, seeding="batch", generator=seeded(), **options
    )
    with loader:
        iterator: Any = iter(loader)
        batches = list(iterator)
    return torch.cat([batch.cpu() for batch in batches]), feed_of(iterator)


def test_batches_go_from_the_slot_to_the_device(gpu: AsyncDevice) -> None:
    """While copies wait, slots are not filled anew: the values would tell."""
    found, feed = run(device="cuda")
    expected, _ = run()
    assert torch.equal(found, expected)
    assert feed.staged_bytes == 0
    assert gpu.pinned == 0
    del found, feed
    gc.collect()
    assert gpu.runtime.locked == {}
