"""How far ahead an epoch runs and how many tickets travel together."""

import pytest

from dpex.measure.settings import Settings
from dpex.schedule.prefetch import LARGEST_GROUP, REMOTE_BYTES, REMOTE_PREFETCH, PrefetchRules

MB = 1 << 20


def pace(seen=0, service_s=0.0, nbytes=0, **changes):
    made = PrefetchRules(**{"logical": False, "may_group": True, "memory_budget": None} | changes)
    for _ in range(seen):
        made.add_batch(service_s, nbytes)
    return made


def settings(local=2, remote=0, prefetch=4, *, fixed=False):
    return Settings(local=local, remote=remote, prefetch=prefetch, is_prefetch_fixed=fixed)


def test_the_first_prefetch_is_torchs_or_two_per_worker():
    assert pace().prefetch(settings(1)) == 4
    assert pace().prefetch(settings(5)) == 10
    assert pace(logical=True).prefetch(settings(5)) == 4
    assert pace(logical=True).prefetch(settings(0, prefetch=0)) == 1


@pytest.mark.parametrize(
    ("given", "is_tuned"), [(settings(), True), (settings(0, 2), False)], ids=["tuned", "all remote"]
)
def test_prefetch_widens_for_groups_of_tiny_batches(given, is_tuned):
    tiny = pace(seen=20, service_s=20e-6, nbytes=20, is_tuned=is_tuned)
    tiny.regroup(given, workers=2)
    assert tiny.group == 50
    assert tiny.prefetch(given) == 4 * 50 * 2
    assert tiny.message_size(tiny.prefetch(given), 2, remote=False) == 50


@pytest.mark.parametrize(
    "given", [settings(), settings(prefetch=128, fixed=True), settings(1, 1), settings(0, 2, prefetch=128, fixed=True)]
)
def test_groups_fit_into_the_prefetch_of_a_number(given):
    made = pace(seen=20, service_s=20e-6, nbytes=20)
    before = made.prefetch(given)
    made.regroup(given, workers=2)
    assert made.prefetch(given) == before
    assert made.group == before // 4


@pytest.mark.parametrize(
    ("what", "seen", "service_s"),
    [({}, 7, 20e-6), ({}, 20, 0.01), ({"may_group": False}, 20, 20e-6)],
    ids=["too early", "not tiny", "the sampler may show it"],
)
def test_other_batches_are_not_grouped(what, seen, service_s):
    made = pace(seen=seen, service_s=service_s, is_tuned=True, **what)
    made.regroup(settings(prefetch=100), workers=2)
    assert made.group == 1
    assert made.prefetch(settings(prefetch=100)) == 100


def test_grouped_batches_in_flight_stay_few_bytes():
    made = pace(seen=20, service_s=20e-6, nbytes=MB, is_tuned=True)
    made.regroup(settings(), workers=2)
    assert made.group == 2
    assert pace(seen=20, service_s=0, nbytes=0).message_size(10**6, 2, remote=True) == LARGEST_GROUP


def test_remote_workers_have_more_in_flight_within_memory():
    assert pace(seen=20, service_s=0.1, nbytes=MB).prefetch(settings(1, 3)) == REMOTE_PREFETCH * 3 + 2
    assert pace(seen=20, service_s=0.1, nbytes=REMOTE_BYTES // 6).prefetch(settings(0, 2)) == 6
    assert pace(seen=20, service_s=0.1, nbytes=REMOTE_BYTES).prefetch(settings(0, 2)) == 4
    assert pace(seen=20, service_s=0.1, nbytes=MB, may_group=False).prefetch(settings(0, 2)) == 4


def test_messages_to_remote_workers_grow_but_leave_none_idle():
    made = pace(seen=20, service_s=0.001)
    assert made.message_size(1000, 2, remote=True) == 10
    assert made.message_size(8, 2, remote=True) == 2
    assert made.message_size(1000, 2, remote=False) == 1
    assert pace(seen=20, service_s=0.1).message_size(1000, 2, remote=True) == 1


def test_explicit_prefetch_and_budget_are_kept_to_the_letter():
    assert pace().prefetch(settings(5, 5, prefetch=3, fixed=True)) == 3
    budgeted = pace(memory_budget=10 * MB)
    assert budgeted.prefetch(settings(5)) == 1
    budgeted.add_batch(0.1, 3 * MB)
    assert budgeted.prefetch(settings(5)) == 3
    budgeted.add_batch(0.1, 11 * MB)
    assert budgeted.prefetch(settings(5)) == 1
    assert budgeted.prefetch(settings(5, prefetch=2, fixed=True)) == 1


def test_a_budget_allows_two_tickets_per_worker_at_first():
    budgeted = pace(memory_budget=32 * MB)
    assert budgeted.is_budgeted
    assert budgeted.within_budget(100, settings(2), 0, 0) == 4
    assert budgeted.within_budget(100, settings(2, remote=1), 0, 0) == 8
    assert budgeted.within_budget(3, settings(2), 0, 0) == 3
    assert budgeted.within_budget(100, settings(2), 4, 0) == 0
    assert not pace().is_budgeted
    at_once = pace(memory_budget=32 * MB, lanes=4)
    assert at_once.within_budget(100, settings(2), 0, 0) == 10
    assert at_once.within_budget(100, settings(2, remote=1), 0, 0) == 17
