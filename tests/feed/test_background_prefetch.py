"""`dpex.prefetch`: the iterable's batches in their order, ahead of need, with errors in their place; cleanly ended."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from async_device import AsyncDevice, DeviceTensor
from torch.utils.data import DataLoader
from waiting import until
from workload import wait_as_work

import dpex
from dpex import IteratorClosedError, OptionError
from dpex.options import DeviceConfig

pytestmark = pytest.mark.timeout(240)


def prefetch_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "dpex-prefetch"]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    assert prefetch_threads() == []


class Watched:
    """Numbers as tensors; tells how many were drawn, and in which threads."""

    def __init__(self, length: int, fails: tuple[int, ...] = ()) -> None:
        self.length, self.fails, self.at = length, fails, 0
        self.threads: set[str] = set()

    def __iter__(self) -> Watched:
        self.at = 0
        return self

    def __next__(self) -> torch.Tensor:
        self.threads.add(threading.current_thread().name)
        if self.at == self.length:
            raise StopIteration
        self.at += 1
        if self.at - 1 in self.fails:
            raise LookupError(f"number {self.at - 1}")
        return torch.full((500,), float(self.at - 1))


# -- what it gives -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 7])
def test_batches_in_their_order_from_another_thread_each_pass_anew(depth: int) -> None:
    source = Watched(20)
    batches = dpex.prefetch(source, depth)
    for _ in range(2):
        assert [batch[0].item() for batch in batches] == list(range(20))
    assert source.threads == {"dpex-prefetch"}


def test_a_generator_has_one_pass() -> None:
    batches = dpex.prefetch(number for number in range(3))
    assert list(batches) == [0, 1, 2]
    assert list(batches) == []


def test_it_draws_so_far_ahead_and_no_further() -> None:
    source = Watched(20)
    iterator = iter(dpex.prefetch(source, depth=3))
    until(lambda: source.at == 3)
    for taken in range(1, 5):
        next(iterator)
        until(lambda: source.at == taken + 3)  # noqa: B023
    del iterator


def test_its_length_is_the_iterable_s() -> None:
    assert len(dpex.prefetch([1, 2, 3])) == 3
    with pytest.raises(TypeError):
        len(dpex.prefetch(number for number in range(3)))


def test_a_loader_of_torch_s() -> None:
    loader = DataLoader(range(6), batch_size=2, num_workers=1)  # type: ignore[arg-type]
    assert [batch.tolist() for batch in dpex.prefetch(loader)] == [[0, 1], [2, 3], [4, 5]]


def test_on_a_device(gpu: AsyncDevice) -> None:
    gpu.holds_new_streams = True
    iterator = iter(dpex.prefetch(Watched(30), depth=4, device="cuda"))
    kept = [next(iterator)]
    gpu.release()
    kept += iterator
    assert {type(batch) for batch in kept} == {DeviceTensor}
    assert [batch.cpu()[0].item() for batch in kept] == list(range(30))


def test_a_batch_beyond_the_budget_is_copied_when_it_is_asked_for(gpu: AsyncDevice) -> None:
    batches = dpex.prefetch(Watched(10), depth=4, device="cuda", device_config=DeviceConfig(budget_bytes=1))
    assert [batch[0].item() for batch in batches] == list(range(10))


def test_a_transform_with_seeds_of_its_own(gpu: AsyncDevice) -> None:
    def noisy(batch: torch.Tensor) -> torch.Tensor:
        return batch + torch.rand(batch.shape, device=batch.device) + random.random()

    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        batches = dpex.prefetch(Watched(10), device="cuda", device_config=DeviceConfig(transform=noisy))
        runs.append(torch.stack([batch.cpu() for batch in batches]))
    assert torch.equal(*runs)
    assert len(runs[0][:, 1].unique()) == 10


# -- errors ------------------------------------------------------------------------------------------------------------


def test_errors_come_in_their_place_with_their_traceback_and_it_goes_on() -> None:
    seen: list[Any] = []
    frames: list[str] = []
    iterator = iter(dpex.prefetch(Watched(8, fails=(3, 5)), depth=3))
    while True:
        try:
            seen.append(next(iterator)[0].item())
        except StopIteration:
            break
        except LookupError as error:
            seen.append(str(error))
            frames += [frame.name for frame in traceback.extract_tb(error.__traceback__)]
    assert seen == [0, 1, 2, "number 3", 4, "number 5", 6, 7]
    assert "_draw" in frames


def test_a_generator_that_fails_is_over() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise LookupError("of the generator")

    iterator = iter(dpex.prefetch(numbers()))
    assert next(iterator) == 1
    with pytest.raises(LookupError):
        next(iterator)
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(iterator)


def test_errors_of_the_copy_come_in_their_place(gpu: AsyncDevice) -> None:
    def pin(tensor: torch.Tensor) -> None:
        if tensor[0] == 1:
            raise OSError("no memory to lock")

    gpu.before_pin = pin
    iterator = iter(dpex.prefetch(Watched(3), device="cuda"))
    assert next(iterator)[0].item() == 0
    with pytest.raises(OSError, match="no memory to lock"):
        next(iterator)
    assert [batch[0].item() for batch in iterator] == [2]


def test_an_exit_of_the_iterable_s_arrives() -> None:
    def numbers() -> Iterator[int]:
        yield 1
        raise SystemExit(3)

    iterator = iter(dpex.prefetch(numbers()))
    next(iterator)
    with pytest.raises(SystemExit):
        next(iterator)


def test_ctrl_c_interrupts_the_wait_and_loses_nothing() -> None:
    asked, gate, consumer = threading.Event(), threading.Event(), threading.get_ident()
    found: list[int] = []

    def numbers() -> Iterator[int]:
        yield 0
        asked.wait(60.0)
        signal.pthread_kill(consumer, signal.SIGINT)
        gate.wait(60.0)
        yield from (1, 2)

    def train() -> None:
        for number in iterator:
            found.append(number)
            asked.set()

    iterator = iter(dpex.prefetch(numbers()))
    with pytest.raises(KeyboardInterrupt):
        train()
    gate.set()
    assert found + list(iterator) == [0, 1, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 0}, "depth=0"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"device": "gpu"}, "device='gpu'"),
        ({"device_config": DeviceConfig(transform=abs)}, "give a device"),
        ({"name": ""}, "name=''"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        dpex.prefetch([1], **options)


# -- ends --------------------------------------------------------------------------------------------------------------


def _break() -> None:
    for _ in dpex.prefetch(Watched(100)):
        break


def _raise() -> None:
    def train() -> None:
        for _ in dpex.prefetch(Watched(100)):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def _unused() -> None:
    iter(dpex.prefetch(Watched(100)))


def _with_block() -> None:
    with dpex.prefetch(Watched(100)) as batches:
        iterator = iter(batches)
        next(iterator)
    assert prefetch_threads() == []
    with pytest.raises(IteratorClosedError):
        next(iterator)
    assert len(list(batches)) == 100


def _in_a_cycle() -> None:
    iterator: Any = iter(dpex.prefetch(Watched(100)))
    iterator.own = iterator
    next(iterator)


def _two_at_once() -> None:
    batches = dpex.prefetch([1, 2, 3])
    assert list(zip(batches, batches, strict=True)) == [(1, 1), (2, 2), (3, 3)]


@pytest.mark.parametrize("way", [_break, _raise, _unused, _with_block, _in_a_cycle, _two_at_once])
def test_it_ends_cleanly(way: Callable[[], None]) -> None:
    way()
    gc.collect()
    assert prefetch_threads() == []


def test_a_generator_is_closed_in_its_thread() -> None:
    closed: list[str] = []

    def numbers() -> Iterator[int]:
        try:
            yield from range(100)
        finally:
            closed.append(threading.current_thread().name)

    for _ in dpex.prefetch(numbers()):
        break
    gc.collect()
    assert closed == ["dpex-prefetch"]


def test_a_forked_process_is_told() -> None:
    iterator = iter(dpex.prefetch(Watched(10)))
    next(iterator)
    child = os.fork()
    if not child:
        code = 1
        try:
            next(iterator)
        except IteratorClosedError:
            code = 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(iterator)) == 9


# -- what is counted ---------------------------------------------------------------------------------------------------


def test_waits_are_put_down_to_what_the_iterable_took() -> None:
    def numbers() -> Iterator[int]:
        for number in range(30):
            wait_as_work(0.005)
            yield number

    batches = dpex.prefetch(numbers(), name="numbers", metrics_port=0)
    iterator: Any = iter(batches)
    assert batches.metrics_url is not None
    seen = list(iterator)
    stats = batches.stats()
    assert len(seen) == stats.batches == stats.pools["inline"].tickets == 30
    assert stats.pools["inline"].load_s >= 30 * 0.005
    sums = batches._runtime.counters.read()
    assert sums.causes["read"] > 0.5 * sums.wait_s
    diagnosis = batches.diagnose()
    assert diagnosis.facts.batches == 30
    batches.close()


def test_the_device_s_part_is_counted(gpu: AsyncDevice) -> None:
    with dpex.prefetch(
        Watched(10), device="cuda", device_config=DeviceConfig(transform=lambda batch: batch * 2)
    ) as batches:
        for batch in batches:
            batch.sum().item()
        sums = batches._runtime.counters.read()
        assert sums.moved_bytes["device"] == 10 * 2000
        assert sums.moved_bytes["h2d"] == 10 * 2000
        assert sums.feed_copy_s > 0
        assert sums.feed_transform_s > 0
