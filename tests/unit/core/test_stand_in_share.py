"""How much the training process makes in place of workers that are on their way: planted times."""

from __future__ import annotations

import pytest

from dpex.core.stand_in_share import SHARE, STRETCH_S, StandInShare

LOOP_S = 10.0


def course(batch_s: float, step_s: float) -> tuple[float, list[float]]:
    """A loop whose batches take that long to make, and whose steps so long: which part of its time batches are made,
    and its pauses."""
    share, now, made_s = StandInShare(), 100.0, 0.0
    end, pauses = now + LOOP_S, []
    while now < end:
        if (pause_s := share.pause_s(now)) > 0.0:
            pauses.append(pause_s)
            now += pause_s
            continue
        share.made(now, now + batch_s)
        made_s += batch_s
        now += batch_s + step_s
    return made_s / LOOP_S, pauses


@pytest.mark.parametrize("batch_s", [30e-6, 0.001, 0.02, 0.3])
def test_a_loop_without_steps_leaves_the_rest_to_those_who_start(batch_s: float) -> None:
    made, pauses = course(batch_s, 0.0)
    assert made == pytest.approx(SHARE, abs=(batch_s + STRETCH_S) / LOOP_S)
    assert min(pauses) >= STRETCH_S / SHARE - 1e-9  # Python's lock changes hands in a pause


@pytest.mark.parametrize("batch_s", [30e-6, 0.001, 0.02, 0.3])
def test_a_loop_that_steps_as_long_waits_for_nothing_but_what_its_first_batch_took(batch_s: float) -> None:
    _, pauses = course(batch_s, batch_s * (1.0 - SHARE) / SHARE)
    assert len(pauses) <= 1


def test_the_first_batch_is_made_at_once() -> None:
    assert StandInShare().pause_s(5.0) == 0.0


def test_a_pause_goes_on_after_something_woke_it() -> None:
    share = StandInShare()
    share.made(0.0, 0.1)
    whole_s = share.pause_s(0.1)
    assert whole_s == pytest.approx(0.1 * (1.0 - SHARE) / SHARE)
    assert share.pause_s(0.15) == pytest.approx(whole_s - 0.05)
    assert share.pause_s(0.1 + whole_s + 1e-9) == 0.0


def test_a_clock_that_goes_back_pauses_for_no_longer() -> None:
    share = StandInShare()
    share.made(10.0, 10.1)
    assert share.pause_s(3.0) == share.pause_s(3.0) > 0.0
