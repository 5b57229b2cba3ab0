"""A feed against an asynchronous device: nothing is read, given back or used anew too early, whatever the device does
first; and what the device would punish is indeed caught by the stand-in."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from async_device import CUDA, AsyncDevice

from dpex import OptionError
from dpex.device.devices import Device, opened
from dpex.device.feed import Arrival, Feed, open_feed
from dpex.loader.checks import parsed_device


@pytest.fixture
def feed(gpu: AsyncDevice) -> Feed:
    made = open_feed(CUDA, 1 << 30, None)
    assert made is not None
    return made


def launched(feed: Feed, batch: Any) -> Arrival:
    return feed.launch(batch, 0, feed.epoch)


def hold_copies(gpu: AsyncDevice) -> None:
    gpu.held = set(gpu.streams) - {gpu.training}


def test_what_is_read_without_waiting_is_caught(gpu: AsyncDevice, feed: Feed) -> None:
    arrival = launched(feed, torch.arange(4.0))
    arrival.batch.sum()
    assert gpu.hazards == ["a tensor was read before the copy or operation that fills it was waited for"]
    gpu.hazards.clear()


def test_the_fake_device_detects_host_memory_freed_too_early(gpu: AsyncDevice) -> None:
    feed = Feed(opened(CUDA), budget_bytes=1 << 30, pin=lambda tensor: tensor)
    hold_copies(gpu)
    arrival = launched(feed, gpu.pin(torch.arange(4.0)))
    feed._in_flight.clear()
    gpu.release()
    gpu.wait_until(lambda: bool(gpu.hazards))
    assert gpu.hazards == ["memory of the host was given back before the copy out of it"]
    del arrival
    gpu.hazards.clear()


def used_while_it_is_dropped(gpu: AsyncDevice, feed: Feed) -> list[Any]:
    """The sums of batches that training drops while its work on them waits."""
    gpu.held = {gpu.training}
    sums = []
    for number in range(6):
        batch = launched(feed, torch.full((64,), float(number)))()
        feed.device._copies.synchronize()  # type: ignore[attr-defined]
        sums.append(batch.sum())
        del batch
    gpu.release()
    return [one.item() / 64 for one in sums]


def test_device_memory_is_not_reused_before_training_is_done(gpu: AsyncDevice, feed: Feed) -> None:
    assert used_while_it_is_dropped(gpu, feed) == list(range(6))
    assert gpu.hazards == []


def test_the_fake_device_detects_device_memory_reused_too_early(
    gpu: AsyncDevice, feed: Feed, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed.device, "record_use", lambda tensor: None)
    used_while_it_is_dropped(gpu, feed)
    assert set(gpu.hazards) == {"memory was used anew while an operation of another stream may read it"}
    gpu.hazards.clear()


def test_an_error_in_the_middle_of_a_copy_keeps_what_was_begun(gpu: AsyncDevice, feed: Feed) -> None:
    class Refuses:
        def to(self, device: torch.device) -> None:
            raise LookupError("no place")

    hold_copies(gpu)
    with pytest.raises(LookupError):
        launched(feed, [torch.arange(4.0), Refuses()])
    assert len(feed._in_flight) == 1
    gpu.release()
    feed.settle()
    assert gpu.hazards == []
    assert not feed._in_flight


def test_what_is_counted(gpu: AsyncDevice, feed: Feed) -> None:
    hold_copies(gpu)
    late = launched(feed, torch.zeros(100))()
    assert feed.late == 1
    gpu.release()
    late.sum().item()
    feed.look()
    assert feed.copied_bytes == 400
    assert feed.copy_s > 0
    assert feed.wait_s > 0
    arrival = launched(feed, torch.zeros(100))
    arrival.ready.synchronize()
    arrival()
    assert feed.late == 1


class Graph:
    """A batch that moves itself, and whose tensors only it knows."""

    def __init__(self, nodes: torch.Tensor, lent: list[Any]) -> None:
        self.parts = {"nodes": [nodes]}
        self.lent = lent

    def to(self, device: torch.device, non_blocking: bool = False) -> Graph:
        assert non_blocking
        return type(self)(self.parts["nodes"][0].to(device, non_blocking=True), self.lent)

    @property
    def nodes(self) -> Any:
        return self.parts["nodes"][0]


class Lender(Graph):
    def record_stream(self, stream: Any) -> None:
        self.lent.append(stream)
        self.nodes.record_stream(stream)


@pytest.mark.parametrize("kind", [Graph, Lender])
def test_a_batch_that_moves_itself(gpu: AsyncDevice, feed: Feed, kind: type[Graph]) -> None:
    lent: list[Any] = []
    gpu.held = {gpu.training}
    sums = []
    for number in range(4):
        batch = launched(feed, kind(torch.full((64,), float(number)), lent))()
        feed.device._copies.synchronize()  # type: ignore[attr-defined]
        sums.append(batch.nodes.sum())
        del batch
    gpu.release()
    assert [one.item() / 64 for one in sums] == [0, 1, 2, 3]
    assert gpu.hazards == []
    assert lent == ([gpu.training] * 4 if kind is Lender else [])
    assert feed.copied_bytes == 4 * 256


@pytest.mark.parametrize("device", ["gpu", "", 1, 1.5, ["cuda"], "meta", "cuda:x"])
def test_what_is_no_device_is_refused(device: Any) -> None:
    with pytest.raises(OptionError, match=r"^device="):
        parsed_device(device)


@pytest.mark.parametrize("device", ["cuda", "cuda:3", torch.device("cpu"), "xpu", None])
def test_what_is_one_is_taken_without_asking_whether_it_is_there(device: Any) -> None:
    assert parsed_device(device) == (None if device is None else torch.device(device))


def test_a_device_that_is_not_there_is_refused_with_a_remedy() -> None:
    with pytest.raises(OptionError, match=r"^device='xpu': torch finds no accelerator here; give device='cpu'"):
        opened(torch.device("xpu"))


def test_a_device_of_another_kind_or_number_is_refused(gpu: AsyncDevice) -> None:
    with pytest.raises(OptionError, match=r"^device='xpu': the accelerator that torch finds here is 'cuda'"):
        opened(torch.device("xpu"))
    with pytest.raises(OptionError, match=r"^device='cuda:3': this process sees 1 of them"):
        opened(torch.device("cuda", 3))


def test_without_an_index_it_is_the_current_one(gpu: AsyncDevice) -> None:
    assert opened(torch.device("cuda")).target == CUDA


def test_a_device_without_queues_copies_at_once(gpu: AsyncDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Apple's: torch has no streams of it."""
    monkeypatch.setattr("dpex.device.devices.device_module", lambda kind: object())
    device = opened(CUDA)
    assert type(device) is Device
    feed = Feed(Device(torch.device("cpu")), budget_bytes=1)
    batch = {"x": torch.arange(3)}
    assert feed.bring(batch, 0) is batch
