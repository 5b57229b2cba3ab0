"""Tickets that are made unseeded: what they give is as if they were seeded, and the training process never notices."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import seeded, until
from torch.utils.data import Dataset

from dpex import DpexDataLoader, ticketseeding
from dpex.globalrandom import ByFunctions, located
from dpex.seeding import epoch_key, ticket_seed
from dpex.ticketseeding import TicketSeeding, seed_ticket

BASE_SEED, EPOCH, TRIAL = 11, 2, 3
numpy_random: Any = np.random


def two_normals() -> tuple[float, float]:
    """Each library draws normal numbers in pairs and keeps the second for the next call."""
    return np.random.normal(), random.gauss(0, 1)


DRAWS: dict[str, Callable[[], Any]] = {
    "random": random.random,
    "random, normal": lambda: random.gauss(0, 1),
    "random, a round of all words": lambda: [random.getrandbits(32) for _ in range(624)],
    "random, its seed": lambda: random.seed(5),
    "numpy": np.random.rand,
    "numpy, normal": np.random.normal,
    "numpy, a round of all words": lambda: np.random.bytes(4 * 624),
    "numpy, its seed": lambda: np.random.seed(5),
    "numpy, another bit generator": lambda: numpy_random.set_bit_generator(np.random.MT19937(5)),
    "torch": lambda: torch.rand(()).item(),
    "torch, normal": lambda: torch.randn(()).item(),
    "torch, a round of all words": lambda: torch.randint(2**31, (624,)).sum().item(),
    "torch, its seed": lambda: torch.default_generator.manual_seed(5),
}


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    generators = ByFunctions()
    state = generators.save()
    yield
    generators.restore(state)


@pytest.fixture(autouse=True)
def soon_quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """However slow the machine is, `TRIAL` tickets without a draw are enough. Forked workers inherit it."""
    monkeypatch.setattr(ticketseeding, "TRIAL", TRIAL)
    monkeypatch.setattr(ticketseeding, "QUIET_S", float("inf"))


def what_comes_next() -> list[Any]:
    """Draws of each generator, in pairs, so that a lost or left normal number shows."""
    words = [random.random(), np.random.rand(), torch.rand(()).item()]
    return [*two_normals(), torch.randn(()).item(), *words, *two_normals(), torch.randn(()).item()]


def half_a_pair() -> None:
    """Leave a normal number in each library's keeping."""
    two_normals()
    torch.randn(())


# -- reading and writing the states ----------------------------------------------------------------------------------


def test_the_generators_are_found_on_this_machine() -> None:
    assert located() is not None


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("kept", [False, True])
def test_a_look_tells_every_draw(draw: Callable[[], Any], kept: bool) -> None:
    memory = located()
    assert memory is not None
    for start in range(5):
        seed_ticket(start)
        if kept:
            half_a_pair()
        before = memory.look()
        assert memory.look() == before
        draw()
        assert memory.look() != before or not memory.holds()


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("make", [located, ByFunctions])
def test_restored_is_as_it_was(make: Callable[[], Any], draw: Callable[[], Any], kept: bool) -> None:
    seed_ticket(1)
    if kept:
        half_a_pair()
    generators = make()
    state = generators.save()
    expected = what_comes_next()
    draw()
    generators.restore(state)
    assert what_comes_next() == expected


def test_another_bit_generator_is_not_taken_for_the_one_that_was_found() -> None:
    memory = located()
    assert memory is not None
    numpy_random.set_bit_generator(np.random.PCG64(1))
    assert not memory.holds()
    assert located() is None


# -- one ticket ------------------------------------------------------------------------------------------------------


def as_seeded(number: int) -> list[Any]:
    seed_ticket(ticket_seed(epoch_key(BASE_SEED, EPOCH), number))
    return what_comes_next()


def quiet_seeding(keep: bool) -> TicketSeeding:
    """After as many tickets without a draw as it takes."""
    seeding = TicketSeeding(BASE_SEED, keep=keep)
    for number in range(TRIAL):
        assert not seeding.quiet
        seeding.make(lambda index: index, number, number, EPOCH)
    assert seeding.quiet
    return seeding


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_the_first_draw_is_made_again_from_its_seed(keep: bool, draw: Callable[[], Any]) -> None:
    """Whatever was drawn first; with ``keep`` the process goes on as if nothing had been."""
    half_a_pair()
    ours = ByFunctions().save()
    seeding = quiet_seeding(keep)
    asked = []

    def fetch(number: int) -> tuple[Any, Any]:
        asked.append(number)
        return what_comes_next(), draw()

    made = [seeding.make(fetch, number, number, EPOCH)[0] for number in (50, 51)]
    after = what_comes_next() if keep else None
    assert made == [as_seeded(50), as_seeded(51)]
    assert asked == [50, 50, 51]
    ByFunctions().restore(ours)
    assert after is None or after == what_comes_next()


def test_who_draws_on_trial_is_always_seeded() -> None:
    seeding = TicketSeeding(BASE_SEED, keep=False)
    asked = []

    def fetch(number: int) -> list[Any]:
        asked.append(number)
        return what_comes_next() if number % 2 else []

    made = [seeding.make(fetch, number, number, EPOCH) for number in range(10)]
    assert made == [as_seeded(number) if number % 2 else [] for number in range(10)]
    assert asked == list(range(10))


def test_slow_tickets_are_always_seeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ticketseeding, "QUIET_S", 0.0)
    seeding = TicketSeeding(BASE_SEED, keep=False)
    for number in range(3 * TRIAL):
        seeding.make(lambda index: index, number, number, EPOCH)
    assert not seeding.quiet


@pytest.mark.parametrize("keep", [False, True])
def test_torchs_initial_seed_is_the_tickets(keep: bool) -> None:
    seeding, own = quiet_seeding(keep), torch.initial_seed()
    seen = [seeding.make(lambda _: torch.initial_seed(), None, number, EPOCH) for number in range(5)]
    assert seen == [ticket_seed(epoch_key(BASE_SEED, EPOCH), number) for number in range(5)]
    assert seeding.quiet
    assert torch.initial_seed() == own


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, StopIteration])
@pytest.mark.parametrize("draws", [False, True])
def test_an_error_leaves_the_process_as_it_was(error: type[BaseException], draws: bool) -> None:
    half_a_pair()
    ours = ByFunctions().save()
    seeding = quiet_seeding(keep=True)
    asked = []

    def fetch(_: Any) -> Any:
        asked.append(what_comes_next()[-1] if draws else None)
        raise error(str(asked[-1]))

    with pytest.raises(error) as caught:
        seeding.make(fetch, None, 7, EPOCH)
    after = what_comes_next()
    ByFunctions().restore(ours)
    assert after == what_comes_next()
    again = draws and issubclass(error, Exception)
    assert len(asked) == 1 + again
    assert seeding.quiet is not draws
    if again:
        assert caught.value.args[0] == str(as_seeded(7)[-1])


# -- loaders ---------------------------------------------------------------------------------------------------------


class SeldomRandom(Dataset[torch.Tensor]):
    """Sample: float64 (4,): the index, and a number of each library for those from ``late`` on."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        numbers = [np.random.normal(), random.gauss(0, 1), torch.randn(()).item()] if index >= self.late else [0.0] * 3
        return torch.tensor([index, *numbers], dtype=torch.float64)


def batches(late: int, workers: int = 0) -> list[torch.Tensor]:
    loader = DpexDataLoader(SeldomRandom(late), 2, num_workers=workers, seeding="batch", generator=seeded())
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("late", [0, 20, 59, 60])
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_do_not_depend_on_when_seeding_began(late: int, workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = batches(late, workers)
    monkeypatch.setattr(ticketseeding, "located", lambda: None)
    expected = batches(late)
    assert len(found) == len(expected) == 60
    assert all(map(torch.equal, found, expected))
    assert len(torch.cat(expected)[:, 1:].unique()) == (2 * 3 * (60 - late) or 1) + (0 < late < 60)


@pytest.mark.parametrize("late", [0, 20, 60])
@pytest.mark.parametrize("by_functions", [False, True])
def test_a_training_loop_draws_what_it_would_draw_alone(
    late: int, by_functions: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_functions:
        monkeypatch.setattr(ticketseeding, "located", lambda: None)
    iterator = iter(DpexDataLoader(SeldomRandom(late), 2, seeding="batch", generator=seeded()))
    half_a_pair()
    ours = ByFunctions().save()
    seen = [what_comes_next()[i % 9 :] for i, _ in enumerate(iterator)]
    ByFunctions().restore(ours)
    assert seen == [what_comes_next()[i % 9 :] for i in range(30)]


def test_one_batch_of_an_epoch_is_made_twice_at_most() -> None:
    dataset = SeldomRandom(20)
    for _ in DpexDataLoader(dataset, 2, seeding="batch"):
        pass
    assert dataset.asked == [*range(22), 20, 21, *range(22, 60)]


def test_once_the_workers_have_left_nothing_is_drawn_ahead() -> None:
    """Every batch goes straight through then, as if there had never been a worker."""
    loader = DpexDataLoader(range(1_000_000), num_workers=2, seeding="batch")
    with loader:
        iterator: Any = iter(loader)
        numbers = [next(iterator).item()]
        loader.resize(local=0)
        engine = iterator._engine
        until(lambda: numbers.append(next(iterator).item()) or engine.lane("local").counts.requested == 0)
        numbers += [next(iterator).item() for _ in range(engine.schedule.in_flight + engine.schedule.ready + 1)]
        assert engine.schedule.idle
        assert numbers == list(range(len(numbers)))
