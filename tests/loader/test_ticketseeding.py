"""``seeding="batch"``: the states each ticket begins with, and what the training process notices of it: nothing."""

import hashlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from families import Augmented, seeded

from dpex import DpexDataLoader
from dpex.schedule.seeding import epoch_key, ticket_seed
from dpex.worker import kept_states
from dpex.worker.batch_seeding import TicketSeeds, seed_ticket
from dpex.worker.kept_states import KeptStates

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


def half_a_pair() -> None:
    """Leave a normal number in each library's keeping."""
    two_normals()
    torch.randn(())


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
def test_a_tickets_generators_depend_only_on_its_seed(draw: Callable[[], Any]) -> None:
    seed_ticket(50)
    expected = states()
    half_a_pair()
    draw()
    seed_ticket(50)
    assert states() == expected
    assert torch.initial_seed() == 50


@pytest.mark.parametrize("kind", [np.random.MT19937, np.random.PCG64])
@pytest.mark.parametrize("has_place", [True, False])
@pytest.mark.parametrize("prepare", [half_a_pair, two_normals], ids=["half a pair", "no half"])
def test_kept_states_are_put_back(
    prepare: Callable[[], Any], has_place: bool, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_place:
        monkeypatch.setattr(kept_states, "places", lambda: (None, None))
    np.random.set_bit_generator(kind(3))  # type: ignore[attr-defined]
    prepare()
    kept, expected = KeptStates(), two_normals()
    np.random.set_bit_generator(np.random.MT19937(1))  # type: ignore[attr-defined]
    for _ in range(2):
        half_a_pair()
        kept.put_back()
        assert two_normals() == expected


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_no_draw_is_left_once_states_are_put_back(draw: Callable[[], Any]) -> None:
    half_a_pair()
    before, kept = states(), KeptStates()
    two_normals()
    draw()
    kept.put_back()
    assert states() == before


def test_states_lie_where_they_are_looked_for() -> None:
    assert None not in kept_states.places()


def test_seeds_of_a_pass_are_those_of_its_key() -> None:
    """Of numbers in any order, as tickets are made again."""
    seeds = TicketSeeds(-(2**63))
    for epoch, number in [(0, 0), (0, 255), (0, 256), (0, 3), (1, 3), (1, 2**40), (0, 700), (0, 699), (0, 511)]:
        assert seeds.of(number, epoch) == ticket_seed(epoch_key(-(2**63), epoch), number)


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
