"""How long what did not help is remembered, and what sort of change it was."""

from __future__ import annotations

import pytest

from dpex.autotune.failed_changes import TO_IN_PROCESS, Change, FailedChanges, change
from dpex.autotune.types import Settings

DEEPER = Change("deeper", 32)


def test_what_did_not_help_is_not_tried_for_a_while_and_then_for_longer() -> None:
    failures = FailedChanges(10.0)
    assert not failures.refused_for_s(DEEPER, 0.0)
    failures.remember(DEEPER, 0.0)
    assert [failures.refused_for_s(DEEPER, at) for at in (0.0, 7.5, 10.0)] == [10.0, 2.5, 0.0]
    failures.remember(DEEPER, 10.0)
    assert [failures.refused_for_s(DEEPER, at) for at in (29.0, 30.0)] == [1.0, 0.0]
    assert not failures.refused_for_s(Change("more local", 4), 10.0)
    failures.remember(DEEPER, 30.0)
    failures.forget()
    assert not failures.refused_for_s(DEEPER, 30.0)


def test_it_is_remembered_for_ten_times_as_long_at_most() -> None:
    failures = FailedChanges(10.0)
    for _ in range(6):
        failures.remember(DEEPER, 0.0)
    assert failures.refused_for_s(DEEPER, 0.0) == 100.0


def test_where_fewer_were_too_few_a_larger_number_may_still_do() -> None:
    failures = FailedChanges(10.0)
    failures.remember(Change("fewer local", 3), 0.0)
    refused = [failures.refused_for_s(Change("fewer local", count), 1.0) for count in (2, 3, 4)]
    assert refused == [9.0, 9.0, 0.0]


@pytest.mark.parametrize(
    ("old", "new", "sort"),
    [
        ((4, 0, 8), (8, 0, 16), Change("more local", 8)),
        ((4, 0, 8), (2, 0, 16), Change("fewer local", 2)),
        ((4, 0, 8), (2, 3, 16), Change("more remote", 3)),
        ((4, 3, 8), (4, 0, 8), Change("fewer remote", 0)),
        ((4, 0, 8), (4, 0, 16), Change("deeper", 16)),
        ((4, 0, 8), (4, 0, 4), Change("shallower", 4)),
        ((4, 0, 8), (0, 0, 1), TO_IN_PROCESS),
        ((0, 0, 1), (4, 0, 8), Change("to workers")),
    ],
)
def test_sorts_of_changes(old: tuple[int, int, int], new: tuple[int, int, int], sort: Change) -> None:
    before, after = (Settings(local=local, remote=remote, prefetch=prefetch) for local, remote, prefetch in (old, new))
    assert change(before, after) == sort
