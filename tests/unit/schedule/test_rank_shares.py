"""How the CPUs of a machine are divided among the ranks of a job."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dpex.schedule.rank_shares import LEAST_CPUS, UNIT_CPUS, RankLoad, divided, need

DEAR = RankLoad(cpu_s=0.4, rate=5.0, wait=0.5)
CHEAP = RankLoad(cpu_s=0.1, rate=5.0, wait=0.0)


def test_a_rank_that_waits_for_another_in_the_all_reduce_needs_what_the_job_would_take() -> None:
    """Without waiting both would take ten batches a second."""
    ranks = {"0": CHEAP, "1": DEAR}
    assert (need(CHEAP, ranks), need(DEAR, ranks)) == (pytest.approx(1.0), pytest.approx(4.0))


def test_ranks_of_other_rates_do_not_step_together() -> None:
    alone = RankLoad(cpu_s=0.1, rate=8.0, wait=0.0)
    assert need(alone, {"0": alone, "1": DEAR}) == pytest.approx(0.8)


def test_the_rank_with_dearer_data_has_more_in_proportion() -> None:
    shares = divided(6.0, 2, {"0": CHEAP, "1": DEAR})
    assert shares["0"] + shares["1"] == pytest.approx(6.0)
    assert shares == {"0": pytest.approx(1.2, abs=0.15), "1": pytest.approx(4.8, abs=0.15)}


def test_equal_ranks_have_equal_parts() -> None:
    assert set(divided(8.0, 4, dict.fromkeys("0123", DEAR)).values()) == {2.0}


def test_ranks_that_say_nothing_keep_an_equal_part() -> None:
    shares = divided(8.0, 4, {"0": CHEAP, "1": DEAR})
    assert sum(shares.values()) == pytest.approx(4.0)


def test_two_loaders_of_a_rank_need_the_cpus_of_both() -> None:
    both = RankLoad(cpu_s=0.1, rate=10.0, wait=0.1, used=1.5).plus(RankLoad(cpu_s=0.4, rate=5.0, wait=0.2, used=1.0))
    assert both == RankLoad(cpu_s=pytest.approx(0.3), rate=10.0, wait=0.2, used=1.5)
    assert RankLoad().plus(RankLoad()) == RankLoad()


loads = st.builds(
    RankLoad,
    cpu_s=st.floats(0, 10),
    rate=st.floats(0, 1000),
    wait=st.floats(0, 1),
    used=st.floats(0, 64),
)


@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.floats(0.1, 256), st.integers(1, 8), st.dictionaries(st.sampled_from("01234567"), loads, min_size=1))
def test_they_never_add_up_to_more_than_there_is(total: float, ranks: int, told: dict[str, RankLoad]) -> None:
    shares = divided(total, ranks, told)
    there = total * len(told) / max(ranks, len(told))
    assert set(shares) == set(told)
    assert there - UNIT_CPUS - 1e-6 <= sum(shares.values()) <= there + 1e-6
    assert min(shares.values()) >= min(LEAST_CPUS, total / max(ranks, len(told))) - 1e-9
