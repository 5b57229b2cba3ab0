"""How far ahead an epoch runs and how many tickets travel together."""

import pytest

from dpex.schedule.prefetch import (
    LARGEST_GROUP,
    REMOTE_BYTES,
    REMOTE_PREFETCH,
    STRAGGLER_FACTOR,
    PrefetchRules,
    Sizes,
)

MB = 1 << 20


def pace(seen=0, service_s=0.0, nbytes=0, **changes):
    made = PrefetchRules(
        **{"base_prefetch": 4, "logical": False, "may_read_ahead": True, "memory_budget": None} | changes
    )
    for _ in range(seen):
        made.learn(service_s, nbytes)
    return made


def sizes(local=2, remote=0, prefetch=None):
    return Sizes(local=local, remote=remote, prefetch=prefetch)


def test_nothing_known_is_torch_s_prefetch_but_two_a_worker_where_any_may_take_any():
    assert pace().prefetch(sizes(1)) == 4
    assert pace().prefetch(sizes(5)) == 10
    assert pace(logical=True).prefetch(sizes(5)) == 4
    assert pace(logical=True, base_prefetch=0).prefetch(sizes(0)) == 1


def test_tiny_batches_are_grouped_and_the_prefetch_makes_room_for_four_groups_a_worker():
    tiny = pace(seen=20, service_s=20e-6, nbytes=20)
    tiny.regroup(sizes(), workers=2)
    assert tiny.group == 50
    assert tiny.prefetch(sizes()) == 4 * 50 * 2
    assert tiny.message_size(tiny.prefetch(sizes()), 2, remote=False) == 50


@pytest.mark.parametrize(
    ("what", "seen", "service_s", "prefetch"),
    [({}, 7, 20e-6, None), ({}, 20, 0.01, None), ({"may_read_ahead": False}, 20, 20e-6, None), ({}, 20, 20e-6, 4)],
    ids=["too early", "not tiny", "somebody could tell", "explicit prefetch"],
)
def test_else_they_are_not(what, seen, service_s, prefetch):
    made = pace(seen=seen, service_s=service_s, **what)
    made.regroup(sizes(prefetch=prefetch), workers=2)
    assert made.group == 1
    assert made.prefetch(sizes(prefetch=prefetch)) == 4


def test_grouped_batches_in_flight_stay_few_bytes():
    made = pace(seen=20, service_s=20e-6, nbytes=MB)
    made.regroup(sizes(), workers=2)
    assert made.group == 2
    assert pace(seen=20, service_s=0, nbytes=0).message_size(10**6, 2, remote=True) == LARGEST_GROUP


def test_remote_workers_have_more_in_flight_as_far_as_memory_goes():
    assert pace(seen=20, service_s=0.1, nbytes=MB).prefetch(sizes(1, 3)) == REMOTE_PREFETCH * 3 + 2
    assert pace(seen=20, service_s=0.1, nbytes=REMOTE_BYTES // 6).prefetch(sizes(0, 2)) == 6
    assert pace(seen=20, service_s=0.1, nbytes=REMOTE_BYTES).prefetch(sizes(0, 2)) == 4
    assert pace(seen=20, service_s=0.1, nbytes=MB, may_read_ahead=False).prefetch(sizes(0, 2)) == 4


def test_a_message_to_a_remote_worker_is_worth_its_way_but_leaves_none_without_work():
    made = pace(seen=20, service_s=0.001)
    assert made.message_size(1000, 2, remote=True) == 10
    assert made.message_size(8, 2, remote=True) == 2
    assert made.message_size(1000, 2, remote=False) == 1
    assert pace(seen=20, service_s=0.1).message_size(1000, 2, remote=True) == 1


@pytest.mark.parametrize(
    ("batch_bytes", "most"), [(1 << 20, STRAGGLER_FACTOR * 4), (4 << 20, 16), (7 << 20, 9), (40 << 20, 8)]
)
def test_large_batches_take_at_most_twice_torchs_memory_behind_a_straggler(batch_bytes: int, most: int):
    made, prefetch = pace(seen=20, service_s=0.1, nbytes=batch_bytes), 4
    while made.widen(prefetch, ready=3):
        prefetch = made.prefetch(sizes())
    assert prefetch == most


def test_explicit_prefetch_and_budget_are_kept_to_the_letter():
    assert pace().prefetch(sizes(5, 5, prefetch=3)) == 3
    budgeted = pace(memory_budget=10 * MB)
    assert budgeted.prefetch(sizes(5)) == 1
    budgeted.learn(0.1, 3 * MB)
    assert budgeted.prefetch(sizes(5)) == 3
    budgeted.learn(0.1, 11 * MB)
    assert budgeted.prefetch(sizes(5)) == 1
    assert budgeted.prefetch(sizes(5, prefetch=2)) == 1


def test_under_a_budget_workers_hold_two_tickets_each_while_nothing_is_known():
    budgeted = pace(memory_budget=32 * MB)
    assert budgeted.is_budgeted
    assert budgeted.within_budget(100, sizes(2), 0, 0) == 4
    assert budgeted.within_budget(100, sizes(2, remote=1), 0, 0) == 8
    assert budgeted.within_budget(3, sizes(2), 0, 0) == 3
    assert budgeted.within_budget(100, sizes(2), 4, 0) == 0
    assert not pace().is_budgeted
