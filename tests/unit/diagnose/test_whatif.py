"""Predictions from known work, where it is clear what must come out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dpex.autotune.types import Settings
from dpex.diagnose.attribution import losses
from dpex.diagnose.candidates import with_workers
from dpex.diagnose.facts import Facts, PoolFacts
from dpex.diagnose.measured_work import estimate
from dpex.diagnose.what_if import Prediction, WhatIf, what_if
from tests.unit.diagnose.test_verdict import PLANTED, facts, pool


def waiting(step_s: float, workers: int = 4, making_s: float = 0.1, batches: int = 400) -> Facts:
    """A run of workers that only wait, each batch as long, as it would be: the slower side sets the pace."""
    period_s = max(step_s, making_s / workers)
    made = PoolFacts(
        tickets=batches, load_s=batches * making_s, workers=workers, queued_s=0.0, services_s=(making_s,) * 64
    )
    return facts(
        {"read": batches * (period_s - step_s)},
        made,
        batches=batches,
        work_s=batches * step_s,
        prefetch=2 * workers,
        trainer_cpu_s=0.0,
    )


def of(measured: Facts) -> WhatIf:
    found = what_if(measured, losses(measured))
    assert found is not None
    return found


def named(found: WhatIf, start: str) -> Prediction:
    return next(one for one in found.predictions if one.change.startswith(start))


def test_workers_that_wait_make_batches_in_proportion_to_their_number() -> None:
    found = of(waiting(step_s=0.01))
    assert found.wait == pytest.approx(0.6, abs=0.01)
    assert named(found, "num_workers=8").wait == pytest.approx(0.2, abs=0.02)
    assert named(found, "num_workers=2").wait == pytest.approx(0.8, abs=0.02)
    assert named(found, "samples cached").wait == pytest.approx(0.0, abs=0.03)
    assert named(found, "the dataset at half").wait == pytest.approx(0.2, abs=0.02)


def test_more_workers_are_recommended_where_they_are_missing() -> None:
    recommended = of(waiting(step_s=0.01)).recommended
    assert recommended is not None
    assert recommended.settings.workers >= 10
    assert recommended.wait < 0.03


def test_fewer_are_recommended_where_nobody_needs_them() -> None:
    recommended = of(waiting(step_s=0.1)).recommended
    assert recommended is not None
    assert recommended.settings.workers < 4
    assert recommended.wait < 0.03


def test_a_full_machine_is_not_to_be_had_twice() -> None:
    """Two CPUs, two workers that compute all the time."""
    measured = replace(
        PLANTED["computing"][2], cpus=2.0, pools={"local": pool(load_s=19.0, load_cpu_s=19.0, workers=2)}
    )
    found = of(replace(measured, prefetch=4))
    assert named(found, "num_workers=4").rate < 1.1 * found.rate
    assert named(found, "the dataset at half").wait < found.wait - 0.1


def test_intervals_hold_their_value_and_narrow_with_more_data() -> None:
    few, many = waiting(step_s=0.01, batches=60), waiting(step_s=0.01, batches=6000)
    times = tuple(0.02 if number % 5 else 0.42 for number in range(100))
    widths = []
    for measured in (few, many):
        spread = replace(measured.pools["local"], services_s=times)
        found = of(replace(measured, pools={"local": spread}, step_spread=0.5))
        assert all(0.0 <= one.low <= one.wait <= one.high <= 1.0 for one in found.predictions)
        one = named(found, "num_workers=8")
        widths.append(one.high - one.low)
    assert widths[0] > widths[1]


def test_a_narrower_type_quarters_the_way() -> None:
    measured = replace(PLANTED["network"][2], cpus=8.0)
    found = losses(measured)
    before = estimate(measured, found).far_s
    assert named(of(measured), "uint8").rate > 1.2 * of(measured).rate
    assert before > 0


def test_without_workers_some_are_suggested() -> None:
    changes = [one.change for one in of(PLANTED["computing in this process"][2]).predictions]
    assert "num_workers=1 instead of 0" in changes


@pytest.mark.parametrize("planted", ["computing", "computing in this process"])
def test_a_number_that_the_program_does_not_give_is_not_called_num_workers(planted: str) -> None:
    """It would be looked for in the script, where another one stands."""
    changes = [one.change for one in of(replace(PLANTED[planted][2], is_tuned=True)).predictions]
    assert not [change for change in changes if "num_workers" in change]
    now = "in-process loading" if "this process" in planted else f"{PLANTED[planted][2].workers} workers"
    assert [change for change in changes if change.endswith(f"workers instead of {now}")]


def test_nothing_is_predicted_from_nothing() -> None:
    assert what_if(Facts(), losses(Facts())) is None


def test_pools_keep_their_proportion() -> None:
    now = Settings(local=1, remote=3, prefetch=8)
    assert with_workers(now, 8) == Settings(local=2, remote=6, prefetch=16)
    assert with_workers(now, 2, is_capped=True).prefetch == 8
