"""Waits by batch: numbers stay right when old ones are dropped, iterators follow, or a count begins anew."""

import pytest

from dpex.measure import sampling
from dpex.measure.sampling import WaitLog, Waits


def logged(count: int, begin: int = 0) -> Waits:
    log = WaitLog()
    for number in range(begin, begin + count):
        log.add(float(number), number + 0.5)
    return log.read()


def shown(found: Waits) -> tuple[int, list[float], list[float]]:
    return found.first, list(found.seconds), list(found.at)


def test_old_waits_are_dropped_and_numbers_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LATEST", 4)
    assert shown(logged(11)) == (7, [7, 8, 9, 10], [7.5, 8.5, 9.5, 10.5])


def test_iterators_follow_one_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampling, "LATEST", 4)
    assert shown(logged(2).then(logged(3, 2))) == (1, [1, 2, 3, 4], [1.5, 2.5, 3.5, 4.5])
    assert shown(logged(2).then(logged(6, 2))) == (4, [4, 5, 6, 7], [4.5, 5.5, 6.5, 7.5])


def test_waits_since_an_earlier_reading_begin_at_0() -> None:
    assert shown(logged(5).since(logged(3))) == (0, [3, 4], [3.5, 4.5])
    assert shown(logged(5).since(Waits())) == shown(logged(5))
    assert shown(logged(5).since(logged(3).counted())) == shown(logged(5).since(logged(3)))
