"""`DpexDataLoader(..., device="cuda")` on a stand-in: the same batches, on the device, ahead of need, ended cleanly."""

import os
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from async_device import AsyncDevice, DeviceTensor
from families import Augmented, Of, assert_same, outcomes, seeded, stacked
from inspection import feed_of, pinner_of
from torch.utils.data import IterableDataset, get_worker_info
from waiting import until

from dpex import BatchTimeoutError, DpexDataLoader, OptionError, UsageError
from dpex.device.feed import USUAL
from dpex.options import DeviceConfig, WorkerConfig


def on_gpu(dataset: Any, workers: int | str = 2, **options: Any) -> DpexDataLoader[Any]:
    options = {"device": "cuda", "generator": seeded(), **options}
    return DpexDataLoader(dataset, num_workers=workers, **options)  # type: ignore[arg-type]


def fetched(batches: Any) -> torch.Tensor:
    batches = list(batches)
    assert {type(batch) for batch in batches} == {DeviceTensor}
    return stacked([batch.cpu() for batch in batches])


class Stream(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        worker = info.id if info else 0
        for number in range(7):
            yield torch.full((1000,), 100.0 * worker + number)


LARGE = Augmented(40, extra=2000)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("dataset", [Augmented(40), LARGE, Stream()], ids=["small", "large", "stream"])
def test_same_batches_in_the_same_order(gpu: AsyncDevice, dataset: Any, workers: int, seeding: str) -> None:
    runs = []
    for device in ("cuda", None):
        with on_gpu(dataset, workers, batch_size=3, seeding=seeding, device=device, shuffle=None) as loader:
            torch.manual_seed(0)
            random.seed(0)
            np.random.seed(0)
            batches = [batch for _ in range(2) for batch in loader]
        runs.append(fetched(batches) if device else stacked(batches))
    assert_same(*runs)


@pytest.mark.parametrize(
    "options",
    [
        *({"persistent_workers": True}, {"pin_memory": True}, {"worker_config": WorkerConfig(memory_budget=100_000)}),
        *(
            {"device_config": DeviceConfig(budget_bytes=1)},
            {"prefetch_factor": 1},
            {"metrics_port": 0},
            {"timeout": 30},
        ),
    ],
    ids=str,
)
def test_with_other_options(gpu: AsyncDevice, options: dict[str, Any]) -> None:
    runs = []
    for device in ("cuda", None):
        more = options if device or "pin_memory" not in options else {}
        with on_gpu(LARGE, batch_size=3, device=device, **more) as loader:
            batches = [batch for _ in range(2) for batch in loader]
        runs.append(fetched(batches) if device else stacked(batches))
    assert_same(*runs)


def test_out_of_order_each_comes_once(gpu: AsyncDevice) -> None:
    with on_gpu(Augmented(60), 3, in_order=False) as loader:
        assert sorted(fetched(loader)[:, 0].tolist()) == list(range(60))


@pytest.mark.parametrize("workers", [0, 2])
def test_trees_with_other_things_in_them(gpu: AsyncDevice, workers: int) -> None:
    dataset = [{"x": torch.full((3,), float(number)), "name": f"n{number}"} for number in range(4)]
    with on_gpu(dataset, workers, batch_size=2) as loader:
        batches = list(loader)
    assert [batch["name"] for batch in batches] == [["n0", "n1"], ["n2", "n3"]]
    assert [batch["x"][:, 0].tolist() for batch in batches] == [[0, 1], [2, 3]]


@pytest.mark.parametrize("device", ["cpu", torch.device("cpu"), None])
def test_on_the_cpu_nothing_is_added(device: Any) -> None:
    with DpexDataLoader(LARGE, num_workers=2, device=device) as loader:
        iterator: Any = iter(loader)
        assert pinner_of(iterator) is None
        assert feed_of(iterator) is None
        assert next(iterator).device.type == "cpu"


@pytest.mark.parametrize("workers", [0, 2])
def test_training_runs_ahead_of_copies_that_have_not_happened(gpu: AsyncDevice, workers: int) -> None:
    """Its slots are not filled anew meanwhile: batches that are kept, and edited where they stand, are right."""
    gpu.holds_new_streams = True
    loader = on_gpu(LARGE, workers, batch_size=4, seeding="batch")
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(4)]
    for batch in kept:
        batch.mul_(2)
    gpu.release()
    kept += iterator
    loader.close()
    with on_gpu(LARGE, workers, batch_size=4, seeding="batch", device=None) as plain:
        expected = list(plain)
    assert len(kept) == len(expected)
    for number, (batch, other) in enumerate(zip(kept, expected, strict=True)):
        assert torch.equal(batch.cpu(), other * 2 if number < 4 else other)


def test_memory_is_used_anew_and_never_too_early(gpu: AsyncDevice) -> None:
    """A thousand batches: training is behind, some are kept, the others dropped at once."""
    gpu.held = {gpu.training}
    kept, sums = [], []
    with on_gpu(Augmented(1000, extra=700), 2, seeding="batch", prefetch_factor=8) as loader:
        for number, batch in enumerate(loader):
            sums.append(batch[:, 0].sum())
            if number % 100 == 0:
                kept.append(batch)
            if number % 50 == 49:
                gpu.release()
                sums[-1].item()
                gpu.held = {gpu.training}
            del batch
    gpu.release()
    assert [one.item() for one in sums] == list(range(1000))
    assert [batch.cpu()[0, 0].item() for batch in kept] == list(range(0, 1000, 100))
    assert gpu.reused > 500


@pytest.mark.parametrize(("budget", "ahead"), [(1 << 30, USUAL), (1, 0)])
def test_so_many_copies_are_begun_ahead_of_need(gpu: AsyncDevice, budget: int, ahead: int) -> None:
    data = Augmented(64, extra=100_000)  # not so small that several may wait
    iterator: Any = iter(on_gpu(data, 1, prefetch_factor=8, device_config=DeviceConfig(budget_bytes=budget)))
    next(iterator)  # tells how large batches are
    for delivered in range(2, 6):
        next(iterator)
        until(lambda: gpu.uploads >= delivered + ahead)  # noqa: B023
        assert gpu.uploads <= delivered + max(ahead, 2 if delivered == 2 else ahead)
    del iterator


def failing_at(index: int) -> torch.Tensor:
    if index == 2:
        raise KeyError("of the dataset")
    return torch.full((1000,), float(index))


def test_errors_come_in_their_place_and_it_goes_on(gpu: AsyncDevice) -> None:
    def pin(tensor: torch.Tensor) -> None:
        if tensor[0, 0] == 4:
            raise OSError("no memory to lock")

    gpu.before_pin = pin
    iterator = iter(on_gpu(Of(failing_at, 6)))
    seen = [one if isinstance(one, type) else one[0, 0].item() for one in outcomes(iterator)]
    assert seen == [0, 1, KeyError, 3, OSError, 5]


@pytest.mark.parametrize(
    ("workers", "seeding", "is_counted"),
    [
        (0, None, False),
        (0, None, True),
        (0, "batch", False),
        (2, None, False),
        (2, "batch", True),
        ("auto", None, False),
    ],
)
def test_a_batch_refused_during_graph_capture_comes_next(
    gpu: AsyncDevice, workers: Any, seeding: Any, is_counted: bool
) -> None:
    loader = on_gpu(Augmented(5), workers, **({} if seeding is None else {"seeding": seeding}))
    if is_counted:
        loader.diagnose()
    iterator = iter(loader)
    first = next(iterator)
    gpu.is_capturing = True
    for _ in range(2):
        with pytest.raises(UsageError):
            next(iterator)
    gpu.is_capturing = False
    state = loader.state_dict()
    assert fetched([first, *iterator])[:, 0].tolist() == list(range(5))
    loader.load_state_dict(state)
    assert fetched(iter(loader))[:, 0].tolist() == list(range(1, 5))


def test_a_timeout_loses_nothing(gpu: AsyncDevice) -> None:
    gate = threading.Event()
    gpu.before_pin = lambda tensor: gate.wait(60.0) and None
    iterator = iter(on_gpu(Augmented(4), timeout=0.1))
    with pytest.raises(BatchTimeoutError):
        next(iterator)
    gate.set()
    found = []
    while len(found) < 4:
        try:
            found.append(next(iterator)[0, 0].item())
        except BatchTimeoutError:
            continue
    assert found == [0, 1, 2, 3]


@pytest.mark.parametrize("workers", [0, 2, "auto"])
def test_a_device_that_is_not_there_is_told_at_iter(workers: int | str) -> None:
    loader = on_gpu(Augmented(4), workers, device="xpu")
    with pytest.raises(OptionError, match="device='xpu'"):
        iter(loader)
    loader.close()


def test_a_loader_with_a_device_can_be_pickled() -> None:
    loader = pickle.loads(pickle.dumps(DpexDataLoader([1, 2], device="cuda:1")))
    assert loader.device == torch.device("cuda", 1)


def _break() -> None:
    for _ in on_gpu(LARGE):
        break


def _raise() -> None:
    def train() -> None:
        for _ in on_gpu(LARGE):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def _closed() -> None:
    loader = on_gpu(LARGE, persistent_workers=True)
    next(iter(loader))
    loader.close()


def _broken_off_and_begun_anew() -> None:
    loader = on_gpu(LARGE, persistent_workers=True, seeding="batch")
    for _ in range(3):
        next(iter(loader))
    assert fetched(loader)[:, 0].tolist() == list(range(40))
    loader.close()


def _two_at_once() -> None:
    loader = on_gpu(LARGE)
    pairs = list(zip(loader, loader, strict=True))
    assert [one[0, 0].item() for one, _ in pairs] == [two[0, 0].item() for _, two in pairs] == list(range(40))


@pytest.mark.parametrize("way", [_break, _raise, _closed, _broken_off_and_begun_anew, _two_at_once])
@pytest.mark.parametrize("is_slow", [False, True], ids=["copies done", "copies late"])
def test_it_ends_cleanly(gpu: AsyncDevice, way: Callable[[], None], is_slow: bool) -> None:
    """Also where copies are not done when the loader ends: then it waits for them."""
    releases = threading.Timer(0.3, gpu.release)
    if is_slow:
        gpu.holds_new_streams = True
        releases.start()
    way()
    releases.cancel()


def test_a_forked_trainer(gpu: AsyncDevice) -> None:
    iterator = iter(on_gpu(Augmented(12)))
    first = next(iterator)
    child = os.fork()
    if not child:
        code = 1
        try:
            del iterator
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fetched([first, *iterator])[:, 0].tolist() == list(range(12))
