"""Who wants which batch, and which are kept: a table of questions and answers, without processes."""

from typing import NamedTuple

import pytest

from dpex.pools.share.cache import LEAST_KEPT, BatchCache, CacheAnswer

ONE, TWO = 1, 2


class Made(NamedTuple):
    nbytes: int = 10
    is_lent: bool = True


def _made(cache: BatchCache, number: int, nbytes: int = 10) -> Made:
    made = Made(nbytes)
    cache.ask(ONE, (0, number), [number])
    cache.made((0, number), [number], made)
    cache.taken(ONE, [(0, number)])
    return made


def test_the_oldest_batch_is_evicted_first_and_remade_on_request() -> None:
    cache = BatchCache(10 * (LEAST_KEPT + 1))
    for number in range(LEAST_KEPT + 3):
        _made(cache, number)
    assert cache.ask(TWO, (0, 0), [0]) == CacheAnswer(must_make=True, is_first=True)
    assert cache.ask(TWO, (0, 2), [2]).value is not None


def test_latest_are_kept_however_large_they_are() -> None:
    cache = BatchCache(1)
    for number in range(LEAST_KEPT + 1):
        _made(cache, number)
    assert cache.ask(TWO, (0, 0), [0]).must_make
    assert cache.ask(TWO, (0, 1), [1]).value is not None


def test_what_is_being_taken_over_stays() -> None:
    cache = BatchCache(1)
    _made(cache, 0)
    cache.ask(TWO, (0, 0), [0])
    for number in range(1, LEAST_KEPT + 2):
        _made(cache, number)
    assert cache.ask(ONE, (0, 0), [0]).value is not None
    cache.taken(ONE, [(0, 0)])
    cache.leave(TWO)
    _made(cache, LEAST_KEPT + 2)
    assert cache.ask(ONE, (0, 0), [0]).must_make


@pytest.mark.parametrize("ends", [BatchCache.leave, lambda cache, who: cache.enter_pass(who, 1)])
def test_what_nobody_waits_for_is_not_made(ends: object) -> None:
    cache = BatchCache(100)
    for who, number in ((ONE, 0), (ONE, 1), (TWO, 1)):
        cache.ask(who, (0, number), [number])
    ends(cache, ONE)  # type: ignore[operator]
    assert not cache.is_wanted((0, 0))
    assert cache.is_wanted((0, 1))
    assert cache.index((0, 1)) == [1]
    assert cache.made((0, 1), [1], Made()) == [(TWO, False)]
