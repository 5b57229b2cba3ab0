"""Tickets made in the training process: as in a worker, with nothing left behind, whatever else the process is at."""

import random
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from families import Of, seeded
from forks import in_a_child
from torch.utils.data import Dataset
from workload import wait_as_work

from dpex import DpexDataLoader, batch_seed
from dpex.schedule.seeding import epoch_key, ticket_seed
from dpex.worker.batch_seeding import InProcessMaker, seed_ticket
from dpex.worker.kept_states import KeptStates
from dpex.worker.setup import Modes, modes_here

BASE_SEED, EPOCH = 11, 2
numpy_random: Any = np.random


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before, threads = KeptStates(), torch.get_num_threads()
    yield
    before.put_back()
    torch.set_num_threads(threads)


def process(modes: Modes | None = None) -> InProcessMaker:
    return InProcessMaker(BASE_SEED, modes or modes_here())


def three() -> tuple[float, ...]:
    """A number of each library, from normal ones, which are drawn in pairs."""
    return random.gauss(0, 1), np.random.normal(), torch.randn(()).item()


def as_seeded(number: int) -> tuple[float, ...]:
    before = KeptStates()
    seed_ticket(ticket_seed(epoch_key(BASE_SEED, EPOCH), number))
    found = three()
    before.put_back()
    return found


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("error", [None, ValueError, KeyboardInterrupt, StopIteration])
def test_a_ticket_leaves_the_process_as_it_was(error: type[BaseException] | None, threads: int) -> None:
    torch.set_num_threads(threads)
    three()
    ours = KeptStates()

    def fetch(_: Any) -> Any:
        assert torch.get_num_threads() == 1
        torch.set_num_threads(3)
        np.random.set_bit_generator(np.random.MT19937(1))  # type: ignore[attr-defined]
        three()
        if error is not None:
            raise error

    with nullcontext() if error is None else pytest.raises(error):
        process().make(fetch, None, 7, EPOCH)
    after = three()
    ours.put_back()
    assert after == three()
    assert torch.get_num_threads() == threads


def test_a_ticket_within_a_ticket() -> None:
    """Of a dataset that iterates a loader of its own, in the same thread."""
    outer = process()

    def fetch(_: Any) -> list[Any]:
        first = random.random()
        within = process().make(lambda _: three(), None, 5, EPOCH)
        return [first, within, random.random()]

    first, within, second = outer.make(fetch, None, 3, EPOCH)
    assert within == as_seeded(5)
    seed_ticket(ticket_seed(epoch_key(BASE_SEED, EPOCH), 3))
    assert [first, second] == [random.random(), random.random()]


def test_a_forked_child_makes_tickets_while_the_parent_makes_one() -> None:
    begun, finish = threading.Event(), threading.Event()

    def fetch(_: Any) -> bool:
        begun.set()
        return finish.wait(60.0)

    thread = threading.Thread(target=process().make, args=(fetch, None, 0, EPOCH))
    thread.start()
    assert begun.wait(60.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        in_a_child(lambda: process().make(lambda _: 42, None, 0, EPOCH))
    finish.set()
    thread.join()


class Noisy(Dataset[torch.Tensor]):
    """Sample: float64 (3,)."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(three(), dtype=torch.float64)


def loaded(data: Dataset[Any], **options: Any) -> list[Any]:
    with DpexDataLoader(data, 2, seeding="batch", generator=seeded(), **options) as loader:
        return list(loader)


class Halting(Noisy):
    """Lets other threads go on between the draws of a sample."""

    def __getitem__(self, index: int) -> torch.Tensor:
        first = three()
        wait_as_work(0.0001)
        return torch.tensor([*first, *three()], dtype=torch.float64)


def test_loaders_in_two_threads_yield_the_batches_of_one_alone() -> None:
    expected, found = loaded(Halting()), {}
    threads = [threading.Thread(target=lambda i=i: found.update({i: loaded(Halting())})) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2
    assert all(torch.equal(*pair) for batches in found.values() for pair in zip(batches, expected, strict=True))


def standardised_at(index: int) -> torch.Tensor:
    """Sample: float32 (3, 224, 224), whose last bits depend on the number of threads that add it up."""
    image = torch.randn(3, 224, 224)
    return (image - image.mean()) / image.std()


def test_reductions_are_those_of_a_worker_to_the_last_bit() -> None:
    torch.set_num_threads(4)
    assert all(map(torch.equal, loaded(Of(standardised_at, 6)), loaded(Of(standardised_at, 6), num_workers=1)))
    assert torch.get_num_threads() == 4


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(before)


MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "default dtype": lambda: default_dtype(torch.float64),
    "none": nullcontext,
}


def moody_at(index: int) -> torch.Tensor:
    """Sample: float32 (3,): whether gradients are recorded, and what dtypes new tensors and products have."""
    one = torch.ones(2, 2)
    sizes = one.itemsize, (one @ one).itemsize
    return torch.tensor([torch.is_grad_enabled(), *sizes], dtype=torch.float32)


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        *((mode, {"num_workers": count}) for mode in MODES for count in (0, 1)),
        ("autocast", {"num_workers": 1, "multiprocessing_context": "spawn"}),
    ],
)
def test_batches_are_made_in_the_modes_of_their_iterator(mode: str, options: dict[str, Any]) -> None:
    """Not in those of the moment, nor in those of a process that was started clean."""
    with DpexDataLoader(Of(moody_at, 4), seeding="batch", **options) as loader:
        with MODES[mode]():
            wanted = Of(moody_at, 4)[0]
            iterator = iter(loader)
        assert all(torch.equal(batch[0], wanted) for batch in iterator)


class Threads(Dataset[torch.Tensor]):
    """Sample: large, and filled with the number of threads that torch has meanwhile."""

    def __init__(self, *, sets: int = 0) -> None:
        self.sets = sets

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.sets:
            torch.set_num_threads(self.sets)
        return torch.full((2**19,), float(torch.get_num_threads()))


@pytest.mark.parametrize(("sets", "stacking"), [(0, 3), (2, 2)], ids=["as they were", "set by the dataset"])
def test_large_batches_are_stacked_by_all_of_torch_s_threads(
    sets: int, stacking: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, stack = [], torch.stack

    def noted(*arguments: Any, **options: Any) -> torch.Tensor:
        found.append(torch.get_num_threads())
        return stack(*arguments, **options)

    monkeypatch.setattr(torch, "stack", noted)
    torch.set_num_threads(3)
    batches = list(DpexDataLoader(Threads(sets=sets), batch_size=4, seeding="batch"))
    assert found == [stacking] * 2
    assert torch.get_num_threads() == 3
    assert torch.equal(torch.cat(batches), torch.full((8, 2**19), float(sets or 1)))


# -- what a dataset may do with the generators -----------------------------------------------------------------------


class Drawn(Dataset[torch.Tensor]):
    """Sample: float64 (2,): its index, and what ``draw`` gave."""

    def __init__(self, draw: Callable[[], float]) -> None:
        self.draw = draw

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor([index, self.draw()], dtype=torch.float64)


def forked() -> float:
    with torch.random.fork_rng():
        return torch.rand(()).item()


def peeked() -> float:
    state = random.getstate()
    found = random.gauss(0, 1)
    random.setstate(state)
    return found


def with_another_generator() -> float:
    found: float = np.random.rand()
    numpy_random.set_bit_generator(np.random.MT19937(3))
    return found


def with_threads_left() -> float:
    found = float(torch.get_num_threads()) + torch.rand(()).item()
    torch.set_num_threads(2)
    return found


def with_a_mode_left() -> float:
    found = float(torch.is_grad_enabled()) + torch.rand(()).item()
    torch.set_grad_enabled(False)
    return found


DRAWS: dict[str, Callable[[], float]] = {
    "random": random.random,
    "random, normal": lambda: random.gauss(0, 1),
    "random, its state": peeked,
    "numpy": np.random.rand,
    "numpy, normal": np.random.normal,
    "numpy, another bit generator": with_another_generator,
    "torch": lambda: torch.rand(()).item(),
    "torch, normal": lambda: torch.randn(()).item(),
    "torch, forked": forked,
    "torch, its seed": lambda: float(torch.initial_seed() % 2**40),
    "torch, its threads": with_threads_left,
    "torch, a mode": with_a_mode_left,
    "the seed": lambda: float(batch_seed() % 2**40),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_inline_batches_match_a_workers_and_keep_generators(draw: Callable[[], float]) -> None:
    leaves = draw in (with_threads_left, with_a_mode_left)  # which a worker keeps, as torch's do
    length = len(Drawn(draw))
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    wanted = [(random.gauss(0, 1), np.random.normal(), torch.randn(()).item()) for _ in range(length // 2)]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    threads, found, drawn = torch.get_num_threads(), [], []
    with torch.enable_grad():
        for batch in DpexDataLoader(Drawn(draw), 2, seeding="batch", generator=seeded()):
            found.append(batch)
            drawn.append((random.gauss(0, 1), np.random.normal(), torch.randn(()).item()))
            torch.set_grad_enabled(True)
    assert leaves or torch.equal(torch.cat(found), torch.cat(loaded(Drawn(draw), num_workers=1)))
    assert drawn == wanted
    assert torch.get_num_threads() == threads
