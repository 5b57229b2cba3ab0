"""An exception of a signal handler inside a sampler: torch's own samplers go on, and a user's generator ends."""

from __future__ import annotations

import contextlib
import gc
import signal
import sys
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest
import torch
from families import outcomes, seeded
from places import TickError
from torch.utils.data import (
    BatchSampler,
    DistributedSampler,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from dpex import DpexDataLoader, InterruptedSamplerError
from dpex.engine.draws import Draws
from dpex.engine.samplers import in_c, indices_from

ROWS = 100
SAMPLERS: dict[str, Callable[[], Any]] = {
    "sequential": lambda: SequentialSampler(range(ROWS)),
    "random": lambda: RandomSampler(range(ROWS)),
    "with a generator": lambda: RandomSampler(range(ROWS), generator=seeded()),
    "with replacement": lambda: RandomSampler(range(ROWS), replacement=True, generator=seeded()),
    "more than rows": lambda: RandomSampler(range(ROWS), num_samples=2 * ROWS + 10),
    "subset": lambda: SubsetRandomSampler(range(5, ROWS)),
    "weighted": lambda: WeightedRandomSampler([1.0] * ROWS, ROWS),
    "distributed": lambda: DistributedSampler(range(ROWS), num_replicas=2, rank=1),
}
KINDS: dict[str, Callable[[Any], Any]] = {
    "batches": lambda sampler: BatchSampler(sampler, 8, drop_last=False),
    "full batches": lambda sampler: BatchSampler(sampler, 8, drop_last=True),
    "single": lambda sampler: sampler,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SAMPLERS)
def test_the_order_is_torchs(name: str, kind: str) -> None:
    torch.manual_seed(3)
    wanted = list(KINDS[kind](SAMPLERS[name]()))
    after = torch.get_rng_state()
    torch.manual_seed(3)
    found = in_c(KINDS[kind](SAMPLERS[name]()))
    assert found is not None
    assert list(found) == wanted
    assert torch.equal(torch.get_rng_state(), after)
    torch.manual_seed(3)
    assert list(indices_from(2, KINDS[kind](SAMPLERS[name]()))) == wanted[2:]


class Ticking:
    """A trace function. A signal comes at the ``at``-th opcode inside torch's samplers."""

    def __init__(self, at: int) -> None:
        self.left = at
        self.came = False

    def __call__(self, frame: FrameType, _event: str, _: Any) -> Any:
        if not frame.f_code.co_filename.endswith("torch/utils/data/sampler.py"):
            return None
        frame.f_trace_opcodes = True
        return self._step

    def _step(self, _frame: FrameType, event: str, _: Any) -> Any:
        self.left -= event == "opcode"
        if not self.left:
            self.came = True
            sys.settrace(None)
            signal.raise_signal(signal.SIGUSR1)
        return self._step


@pytest.mark.parametrize("name", SAMPLERS)
def test_torchs_samplers_lose_nothing_to_an_interrupt(name: str) -> None:
    """Draws by other code go on as they would, and so does a generator of the sampler."""

    def drawn(at: int) -> tuple[list[Any], torch.Tensor, Any, bool]:
        torch.manual_seed(3)
        sampler = SAMPLERS[name]()
        batches = BatchSampler(sampler, 8, drop_last=False)
        draws = Draws(batches, None, iter(batches), copies=False, is_stream=False)
        tick, found, end = Ticking(at), list[Any](), 3
        sys.settrace(tick)
        while True:
            try:
                draws.draw(end)
            except TickError:
                continue
            finally:
                found = [*found, *(index for index, number in draws.drawn if number >= len(found))]
            if not draws.has(end - 1):
                break
            end += 3
            torch.rand(1)
        sys.settrace(None)
        own = getattr(sampler, "generator", None)
        return found, torch.get_rng_state(), None if own is None else own.get_state().tolist(), tick.came

    wanted = drawn(1_000_000)
    at, came = 0, True
    while came:
        at += 1
        *found, came = drawn(at)
        assert found[0] == wanted[0]
        assert torch.equal(found[1], wanted[1])
        assert found[2] == wanted[2]
    assert at > 1 or name in ("sequential", "distributed", "subset")  # all in C


class OwnBatches(Sampler[list[int]]):
    """A sampler of a user's, whose iterator is a generator."""

    def __iter__(self) -> Iterator[list[int]]:
        for at in range(0, ROWS, 4):
            if at == 48:
                signal.raise_signal(signal.SIGUSR1)
            yield list(range(at, at + 4))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_generator_of_the_users_ends_with_an_error(workers: int) -> None:
    loader = DpexDataLoader(range(ROWS), batch_sampler=OwnBatches(), num_workers=workers)  # type: ignore[arg-type]
    found = outcomes(iter(loader))
    assert [one for one in found if isinstance(one, type)] == [TickError, InterruptedSamplerError]
    assert torch.cat([one for one in found if not isinstance(one, type)]).tolist() == list(range(48))


class OwnIterator(OwnBatches):
    """A sampler of a user's that is its own iterator, and goes on after an exception."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> OwnIterator:  # type: ignore[override]
        return self

    def __next__(self) -> list[int]:
        self.at += 4
        if self.at == 48:
            signal.raise_signal(signal.SIGUSR1)
        return list(range(self.at - 4, self.at))


@pytest.mark.parametrize("sampler", [OwnBatches, OwnIterator])
def test_an_interrupted_iterator_ends_with_its_last_reference(sampler: Callable[[], Any]) -> None:
    """Neither the exception nor its traceback is kept, whose frames would keep the iterator and its workers."""
    loader = DpexDataLoader(range(ROWS), batch_sampler=sampler(), num_workers=1)  # type: ignore[arg-type]
    iterator = iter(loader)
    with contextlib.suppress(TickError):
        while True:
            next(iterator)
    is_left = weakref.ref(iterator)
    del iterator
    gc.collect()
    assert is_left() is None
