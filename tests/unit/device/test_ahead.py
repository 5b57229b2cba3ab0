"""How many batches wait on the device."""

import pytest

from dpex.device.feed import JUDGED, MOST, SMALL_BYTES, USUAL, Ahead

MB = 1 << 20


def after(ahead: Ahead, *shares: float) -> int:
    """How many wait after as many periods, in each of which that share of the batches was late."""
    for share in shares:
        for number in range(JUDGED):
            ahead.taken(is_late=number < share * JUDGED)
    return ahead.batches


@pytest.mark.parametrize(("budget", "ahead"), [(100, 2), (20, 2), (19, 1), (10, 1), (9, 0)])
def test_the_budget_bounds_it_by_the_largest_batch(budget: int, ahead: int) -> None:
    found = Ahead(budget * MB)
    for nbytes in (1 * MB, 10 * MB, 3 * MB):
        found.saw(nbytes)
    assert found.batches == ahead


@pytest.mark.parametrize(
    ("nbytes", "budget", "ahead"),
    [(16_000, 1 << 30, MOST), (SMALL_BYTES // 5, 1 << 30, 5), (SMALL_BYTES, 1 << 30, USUAL), (16_000, 48_000, 3)],
)
def test_of_small_batches_more_wait_within_the_budget(nbytes: int, budget: int, ahead: int) -> None:
    found = Ahead(budget)
    found.saw(nbytes)
    assert found.batches == ahead


def test_a_further_batch_is_kept_where_it_helps() -> None:
    assert after(Ahead(MB), 0.5) == USUAL + 1
    assert after(Ahead(MB), 0.5, 0.2) == USUAL + 2
    assert after(Ahead(MB), 0.5, 0.2, 0.2) == USUAL + 1
    assert after(Ahead(MB), 0.5, 0.0, 0.0) == USUAL + 1


def test_a_useless_deeper_read_ahead_is_reverted_and_not_retried() -> None:
    """Copies that take longer than steps are late however many wait."""
    assert after(Ahead(MB), 1.0, 1.0) == USUAL
    assert after(Ahead(MB), *[1.0] * 20) == USUAL


def test_chance_is_not_acted_upon() -> None:
    assert after(Ahead(MB), 0.1, 0.1, 0.1) == USUAL


def test_the_budget_holds_while_it_is_tuned() -> None:
    ahead = Ahead(25)
    ahead.saw(10)
    assert after(ahead, 0.5) == 2
