"""Judging in-process loading: it warms up as workers do, and what workers copy slows down the training step."""

from __future__ import annotations

import pytest

from dpex.autotune.ceiling import Ceilings
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.failed_changes import FailedChanges, change
from dpex.autotune.felt import FeltSample
from dpex.autotune.trials import Trials, TrialVerdict
from dpex.autotune.types import Sample, Settings
from tests.unit.autotune.test_trial import CONFIG, FOUR, decided, record, window

HERE = Settings(prefetch=1)
SLOW_START = [window(5, 0.03)] * 2
WARM = [window(20, 0.001)] * 4
UNEVEN = [window(20, loss_s) for loss_s in (0.005, 0.025, 0.005, 0.025)]


class Trial:
    """In-process loading on trial after such windows with workers. ``seconds``: for how long it lasted."""

    def __init__(self, *before: Sample, is_copying: bool = False) -> None:
        estimator = WorkEstimator()
        for _ in range(4):
            estimator.add(FeltSample(sample=window(20, 0.001)))
        self.failures = FailedChanges(60.0)
        self.trials = Trials(CONFIG, estimator, self.failures, Ceilings(60.0))
        self.seconds = 0.0
        self.trials.begin(decided(FOUR, HERE, "explore"), record(*before), ready=0, is_copying=is_copying)

    def judge(self, *windows: Sample) -> TrialVerdict:
        """These windows in turns, for as long as it lasts."""
        while True:
            for one in windows:
                self.seconds += one.seconds
                verdict = self.trials.judge(one, one.wait_s)
                if verdict.is_over:
                    return verdict


@pytest.mark.parametrize(
    ("before", "kept"),
    [
        pytest.param([*SLOW_START, *WARM], False, id="workers that warm up"),
        pytest.param([window(20, 0.01)] * 4, True, id="workers that stay slow"),
    ],
)
def test_it_is_not_compared_with_workers_that_warm_up(before: list[Sample], kept: bool) -> None:
    """It loses 2 ms a batch, and warm workers 1 ms."""
    assert record(*before).loss()[0] > 0.003, "with the warm-up, workers are worse"
    assert (Trial(*before).judge(window(20, 0.002)).failed is None) is kept


@pytest.mark.parametrize(
    ("at_first", "kept"),
    [
        pytest.param(0.0042, True, id="a little slower at first: looked at again"),
        pytest.param(0.0062, False, id="much slower: it is over"),
    ],
)
def test_it_warms_up_as_workers_do(at_first: float, kept: bool) -> None:
    """Workers lose 3 ms a batch, and in-process loading 1 ms in the end; steps take 10 ms."""
    trial = Trial(*[window(20, 0.003)] * 4)
    cold, warm = window(20, at_first), window(20, 0.001)
    verdict = trial.judge(cold, cold, cold, *[warm] * 100)
    assert (verdict.failed is None) is kept


def test_it_is_looked_at_again_only_once() -> None:
    trial = Trial(*[window(20, 0.003)] * 4)
    assert trial.judge(window(20, 0.0042)).failed is not None
    assert trial.seconds < 2.0


def test_where_workers_copy_the_whole_time_of_a_batch_is_compared() -> None:
    """In-process loading loses 2 ms more, and the step is 4 ms shorter, as nobody else uses the memory."""
    before, since = [window(20, 0.002, step_s=0.012)] * 4, window(20, 0.004, step_s=0.008)
    assert Trial(*before, is_copying=True).judge(since).failed is None
    assert Trial(*before).judge(since).failed is not None, "steps may be shorter for reasons of their own"


def test_what_may_pay_is_watched_for_longer_and_what_may_not_is_not() -> None:
    """Windows differ by far, so that it stays uncertain."""
    promising, hopeless = Trial(*UNEVEN), Trial(*UNEVEN)
    promising.judge(window(20, 0.0), window(20, 0.02))
    hopeless.judge(window(20, 0.007), window(20, 0.027))
    assert promising.seconds > EVALUATION.patience_s > hopeless.seconds


def test_what_did_not_surely_help_is_not_tried_again_soon() -> None:
    trial = Trial(*UNEVEN)
    verdict = trial.judge(window(20, 0.002), window(20, 0.024))
    assert verdict.failed is not None
    assert verdict.failed.gain > 0.0
    assert trial.failures.refused_for_s(change(FOUR, HERE), 1.0) > 50.0
