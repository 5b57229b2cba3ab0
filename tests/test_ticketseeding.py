"""``seeding="batch"``: the states each ticket begins with, and what the training process notices of it: nothing."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import Augmented, seeded
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.schedule.seeding import epoch_key, ticket_seed
from dpex.worker.batch_seeding import TicketSeeds, seed_ticket
from dpex.worker.states import KeptStates

BASE_SEED, EPOCH = 11, 2
SEEDS = [0, 1, 2**63 - 1, 0x1234567890ABCDEF]
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
    before = KeptStates()
    yield
    before.put_back()


def what_comes_next() -> list[Any]:
    """Draws of each generator, in pairs, so that a lost or left normal number shows."""
    words = [random.random(), np.random.rand(), torch.rand(()).item()]
    return [*two_normals(), torch.randn(()).item(), *words, *two_normals(), torch.randn(()).item()]


def half_a_pair() -> None:
    """Leave a normal number in each library's keeping."""
    two_normals()
    torch.randn(())


# -- keeping the states, and putting them back -------------------------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
@pytest.mark.parametrize("kept", [False, True])
def test_put_back_is_as_it_was(draw: Callable[[], Any], kept: bool) -> None:
    seed_ticket(1)
    if kept:
        half_a_pair()
    before = KeptStates()
    expected = what_comes_next()
    draw()
    before.put_back()
    assert what_comes_next() == expected


# -- one ticket --------------------------------------------------------------------------------------------------------


def states() -> tuple[Any, ...]:
    """All that can be read of the three, by their own functions."""
    name, key, *rest = np.random.get_state()
    torch_state = torch.get_rng_state().tolist()
    return random.getstate(), (name, *np.asarray(key).tolist(), *rest), torch_state, torch.initial_seed()


GOLDEN = dict(zip(SEEDS, ["e30067690158c11f", "58a4eec977c1acb2", "5dc07ef0de31d051", "426f4512d6e26f3f"], strict=True))
"""SHA-256 of the three states of a seed, its first 16 digits. A change of these changes every user's batches."""
GOLDEN_BATCHES = "3adffbe7f93b148b"


def digest_of_states() -> str:
    _, words, kept = random.getstate()
    name, key, position, has_gauss, gauss = np.random.get_state()
    parts = [
        np.array(words, "<u4").tobytes(),
        repr((kept, name, position, has_gauss, gauss)).encode(),
        np.asarray(key).astype("<u4").tobytes(),
        torch.get_rng_state().numpy().tobytes(),
    ]
    return hashlib.sha256(b"".join(parts)).hexdigest()[:16]


@pytest.mark.parametrize("seed", SEEDS)
def test_the_states_of_a_seed_are_those_of_every_release(seed: int) -> None:
    half_a_pair()
    seed_ticket(seed)
    assert digest_of_states() == GOLDEN[seed]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_batches_of_a_base_seed_are_those_of_every_release(workers: int) -> None:
    loader = DpexDataLoader(Augmented(40), 2, num_workers=workers, seeding="batch", generator=seeded())
    found = torch.cat([batch for _ in range(2) for batch in loader])
    assert hashlib.sha256(found.numpy().tobytes()).hexdigest()[:16] == GOLDEN_BATCHES


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_ticket_begins_with_the_states_of_its_seed_whatever_was_drawn_before(draw: Callable[[], Any]) -> None:
    seed_ticket(50)
    expected = states()
    half_a_pair()
    draw()
    seed_ticket(50)
    assert states() == expected
    assert torch.initial_seed() == 50


def test_seeds_that_are_computed_together_are_those_computed_alone() -> None:
    """Of numbers in any order, as tickets are made again."""
    seeds = TicketSeeds(-(2**63))
    for epoch, number in [(0, 0), (0, 255), (0, 256), (0, 3), (1, 3), (1, 2**40), (0, 700), (0, 699), (0, 511)]:
        assert seeds.of(number, epoch) == ticket_seed(epoch_key(-(2**63), epoch), number)


# -- the quality of the numbers ----------------------------------------------------------------------------------------

TICKETS = 20_000
CELLS = 64


@pytest.fixture(scope="module")
def firsts() -> np.ndarray[Any, Any]:
    """Of each of `TICKETS` in a row the first two numbers of each library: float64 (`TICKETS`, 6) in [0, 1)."""
    before, rows = KeptStates(), []
    key = epoch_key(BASE_SEED, EPOCH)
    for number in range(TICKETS):
        seed_ticket(ticket_seed(key, number))
        of_torch = torch.rand(2, dtype=torch.float64).tolist()
        rows.append([random.random(), random.random(), *np.random.random_sample(2), *of_torch])
    before.put_back()
    return np.array(rows)


def chi_square(counts: np.ndarray[Any, Any]) -> float:
    """Standard deviations by which the counts of equally likely cells are further from equal than chance has it."""
    expected, free = counts.sum() / counts.size, counts.size - 1
    return float((((counts - expected) ** 2 / expected).sum() - free) / np.sqrt(2 * free))


BOUND = 5.0
"""Standard deviations: of some 200 that are compared none is expected beyond 4."""


def test_first_numbers_of_tickets_are_equally_distributed(firsts: np.ndarray[Any, Any]) -> None:
    for column in firsts.T:
        for value in (column, column * 2**20 % 1):  # leading bits, and those far behind
            assert abs(chi_square(np.bincount((value * CELLS).astype(int), minlength=CELLS))) < BOUND


def test_libraries_and_consecutive_tickets_are_independent(firsts: np.ndarray[Any, Any]) -> None:
    """In pairs: numbers of one ticket, and of tickets 1, 2, 7 apart; by squares of a grid, and by correlation."""
    columns = firsts.shape[1]
    pairs = [(a, b, 0) for a in range(columns) for b in range(a)]
    pairs += [(a, b, apart) for apart in (1, 2, 7) for a in range(columns) for b in range(columns)]
    for a, b, apart in pairs:
        x, y = firsts[: TICKETS - apart, a], firsts[apart:, b]
        grid = (x * 8).astype(int) * 8 + (y * 8).astype(int)
        assert abs(chi_square(np.bincount(grid, minlength=64))) < BOUND
        assert abs(np.corrcoef(x, y)[0, 1]) * np.sqrt(TICKETS) < BOUND


def words_of(seed: int) -> np.ndarray[Any, Any]:
    """The words of all three states but `random`'s first, which is a constant: uint32 (1871,)."""
    seed_ticket(seed)
    of_numpy: Any = np.random.get_state()[1]
    of_torch = torch.get_rng_state().numpy()[24:].view(np.uint64)[:624]
    return np.concatenate([np.array(words, np.uint32) for words in (random.getstate()[1][1:-1], of_numpy, of_torch)])


def test_no_word_is_shared_between_libraries_or_tickets() -> None:
    """Of 200 tickets: 374,200 words of 32 bits, of which chance repeats some 16."""
    words = np.concatenate([words_of(ticket_seed(epoch_key(BASE_SEED, EPOCH), number)) for number in range(200)])
    assert len(words) - len(np.unique(words)) < 48
    ones = np.unpackbits(words.view(np.uint8)).reshape(len(words), 32).sum(axis=0)
    assert (abs(ones - len(words) / 2) / np.sqrt(len(words) / 4)).max() < BOUND


# -- loaders -----------------------------------------------------------------------------------------------------------


class SeldomRandom(Dataset[torch.Tensor]):
    """Sample: float64 (4,): the index, and a number of each library for those from ``late`` on."""

    def __init__(self, late: int) -> None:
        self.late = late
        self.asked: list[int] = []

    def __len__(self) -> int:
        return 80

    def __getitem__(self, index: int) -> torch.Tensor:
        self.asked.append(index)
        numbers = [np.random.normal(), random.gauss(0, 1), torch.randn(()).item()] if index >= self.late else [0.0] * 3
        return torch.tensor([index, *numbers], dtype=torch.float64)


def batches(data: Dataset[torch.Tensor], workers: int = 0) -> list[torch.Tensor]:
    loader = DpexDataLoader(data, 2, num_workers=workers, seeding="batch", generator=seeded())
    return [batch for _ in range(2) for batch in loader]


@pytest.mark.parametrize("late", [0, 60, 80])
def test_batches_do_not_depend_on_the_number_of_workers(late: int) -> None:
    expected = batches(SeldomRandom(late))
    assert len(torch.cat(expected)[:, 1:].unique()) == (2 * 3 * (80 - late) or 1) + (0 < late < 80)
    for workers in (1, 2):
        found = batches(SeldomRandom(late), workers)
        assert len(found) == len(expected) == 80
        assert all(map(torch.equal, found, expected))
