"""`DeviceConfig.transform`: queued behind the copy, ahead of need, and with random numbers that belong to the batch."""

import gc
import random
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from async_device import AsyncDevice, DeviceTensor
from families import Augmented, outcomes, seeded
from inspection import feed_of
from waiting import until

import dpex
from dpex import DpexDataLoader, IteratorInterruptedError
from dpex.options import DeviceConfig


def noisy(batch: torch.Tensor) -> torch.Tensor:
    """Of the device's generator and of each of the host's; column 0 stays the index."""
    drawn = torch.rand(batch.shape, device=batch.device, dtype=torch.float64)
    host = random.random() + float(np.random.rand()) + torch.rand(()).item() + dpex.batch_seed() % 1000
    made = batch * 2 + drawn + host
    made[:, 0] = batch[:, 0]
    return made


def loader_of(workers: int | str, **options: Any) -> DpexDataLoader[Any]:
    options = {
        "device": "cuda",
        "device_config": DeviceConfig(transform=noisy),
        "batch_size": 4,
        "generator": seeded(),
        **options,
    }
    return DpexDataLoader(Augmented(40, extra=700), num_workers=workers, **options)  # type: ignore[arg-type]


def epochs(workers: int | str, count: int = 2, **options: Any) -> torch.Tensor:
    found = []
    with loader_of(workers, **options) as loader:
        for _ in range(count):
            for batch in loader:
                assert type(batch) is DeviceTensor
                found.append(batch.cpu())
    return torch.cat(found)


def test_it_draws_the_same_whoever_made_the_batch(gpu: AsyncDevice) -> None:
    expected = epochs(0, seeding="batch")
    small = {"device_config": DeviceConfig(transform=noisy, budget_bytes=1)}
    for workers, options in ((1, {}), (2, {}), (2, small), ("auto", {})):
        assert torch.equal(epochs(workers, seeding="batch", **options), expected)


def test_epochs_and_batches_differ(gpu: AsyncDevice) -> None:
    added = epochs(
        2,
        seeding="batch",
        device_config=DeviceConfig(transform=lambda batch: batch * 0 + torch.rand(batch.shape, device="cuda")),
    )
    assert len(added[:, 1].unique()) == len(added)


def test_other_iterators_draw_the_same(gpu: AsyncDevice) -> None:
    draws: Callable[[Any], Any] = lambda batch: batch[:, :1] * 0 + torch.rand((4, 1), device="cuda")  # noqa: E731
    expected = epochs(2, count=1, device_config=DeviceConfig(transform=draws))
    persistent = epochs(2, count=1, device_config=DeviceConfig(transform=draws), persistent_workers=True)
    assert torch.equal(persistent, expected)
    assert torch.equal(epochs(0, count=1, device_config=DeviceConfig(transform=draws)), expected)


@pytest.mark.parametrize("workers", [0, 2])
def test_the_generators_of_training_are_left_as_they_were(gpu: AsyncDevice, workers: int) -> None:
    iterator = iter(loader_of(workers, seeding="batch"))
    gpu.manual_seed(5)
    torch.manual_seed(5)
    random.seed(5)
    before = gpu.get_rng_state(), torch.get_rng_state(), random.getstate()
    next(iterator)
    next(iterator)
    after = gpu.get_rng_state(), torch.get_rng_state(), random.getstate()
    assert torch.equal(before[0], after[0])
    assert torch.equal(before[1], after[1])
    assert before[2] == after[2]


def test_it_is_called_ahead_of_need(gpu: AsyncDevice) -> None:
    """When a batch is taken, for those whose copies have begun."""
    seen: list[int] = []

    def transform(batch: Any) -> Any:
        seen.append(0)
        return batch

    iterator: Any = iter(loader_of(1, device_config=DeviceConfig(transform=transform), prefetch_factor=8))
    next(iterator)
    until(lambda: gpu.uploads >= 3)
    next(iterator)
    assert len(seen) >= 3
    feed = feed_of(iterator)
    del iterator
    gc.collect()
    feed.begin_epoch(0)
    assert not feed._to_transform


def test_what_it_reads_beside_the_batch_is_waited_for(gpu: AsyncDevice) -> None:
    """Made by training just before the pass, on another queue."""
    feed_of_training = iter(loader_of(1, device_config=DeviceConfig(transform=None)))
    mean = next(feed_of_training)[0:1] * 0 + 3
    found = epochs(2, count=1, device_config=DeviceConfig(transform=lambda batch: batch + mean))
    assert torch.equal(found[:, 0], torch.arange(40.0, dtype=torch.float64) + 3)
    del feed_of_training


def test_its_errors_come_in_their_place_and_it_goes_on(gpu: AsyncDevice) -> None:
    calls: list[int] = []

    def transform(batch: Any) -> Any:
        calls.append(0)
        if len(calls) == 3:
            raise LookupError("of the transform")
        return batch

    iterator = iter(loader_of(2, device_config=DeviceConfig(transform=transform)))
    seen = [one if isinstance(one, type) else one[0, 0].item() for one in outcomes(iterator)]
    assert seen == [0, 4, LookupError, *range(12, 40, 4)]


def test_an_interrupted_transform_breaks_the_iterator(gpu: AsyncDevice) -> None:
    """The batch may have been changed where it stands. It is made again after a resume."""
    calls: list[int] = []

    def transform(batch: Any) -> Any:
        batch.mul_(2)
        calls.append(0)
        if len(calls) == 3:
            signal.raise_signal(signal.SIGINT)
        return batch

    with loader_of(2, device_config=DeviceConfig(transform=transform)) as loader:
        iterator, found = iter(loader), list[float]()
        with pytest.raises(KeyboardInterrupt):
            found.extend(batch[0, 0].item() for batch in iterator)
        with pytest.raises(IteratorInterruptedError, match="KeyboardInterrupt"):
            next(iterator)
        loader.load_state_dict(loader.state_dict())
        found += [batch[0, 0].item() for batch in loader]
    assert found == [2.0 * first for first in range(0, 40, 4)]


@pytest.mark.parametrize("workers", [0, 2])
def test_on_the_cpu_it_runs_on_the_host(workers: int) -> None:
    with loader_of(workers, device="cpu", seeding="batch") as loader:
        first = torch.cat(list(loader))
    with loader_of(2 - workers, device="cpu", seeding="batch") as loader:
        assert torch.equal(torch.cat(list(loader)), first)


def test_what_is_counted(gpu: AsyncDevice) -> None:
    with loader_of(2, persistent_workers=True) as loader:
        iterator: Any = iter(loader)
        for batch in iterator:
            batch.cpu()
        feed = feed_of(iterator)
        assert feed.transform_s > 0
        assert feed.copied_bytes == 40 * 704 * 8


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resumed_epoch_draws_as_it_would_have(workers: int, gpu: AsyncDevice) -> None:
    options = {"seeding": "batch", "persistent_workers": workers > 0}
    with loader_of(workers, **options) as first:
        list(first)
        batches = iter(first)
        next(batches)
        state = first.state_dict()
        rest = [batch.cpu() for batch in batches]
    with loader_of(workers, **options) as second:
        second.load_state_dict(state)
        assert torch.equal(torch.cat([batch.cpu() for batch in second]), torch.cat(rest))


class Failing:
    """A sampler with an error after its first index."""

    def __iter__(self) -> Any:
        yield 0
        raise LookupError("of the sampler")


def test_an_error_of_the_sampler_is_not_transformed(gpu: AsyncDevice) -> None:
    with loader_of(1, sampler=Failing(), batch_size=1) as loader, pytest.raises(LookupError, match="of the sampler"):
        list(loader)
