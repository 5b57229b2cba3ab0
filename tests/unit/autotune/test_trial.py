"""Judging a decision: by what batches cost the consumer, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.evaluation import Evaluation
from dpex.autotune.types import Decision, Reason, Sample, Settings
from dpex.autotune.window_record import WindowRecord
from dpex.measure.samples import MachineSample, PoolSample

CONFIG = AutotuneConfig(gain=0.04)
FOUR, EIGHT = Settings(local=4, prefetch=8), Settings(local=8, prefetch=16)
FORTY = Settings(local=40, prefetch=80)


def window(batches: int, wait_s: float, *, step_s: float = 0.01, head_s: float = 0.0) -> Sample:
    """Steps of ``step_s``, and ``wait_s`` lost per batch."""
    pool = PoolSample(running=4, tickets=batches, load_s=batches * 0.02)
    seconds = batches * (step_s + wait_s)
    return Sample(
        at=0.0,
        seconds=seconds,
        settings=FOUR,
        batches=batches,
        wait_s=batches * wait_s,
        work_s=batches * step_s,
        head_s=head_s,
        local=pool,
    )


def record(*windows: Sample) -> WindowRecord:
    made = WindowRecord()
    for sample in windows:
        made.add(sample, sample.wait_s)
    return made


def work(step_s: float = 0.01, slowest_s: float = 0.0, variation: float = 0.1) -> Any:
    return SimpleNamespace(
        step_s=step_s, slowest_s=lambda: slowest_s, variation=lambda: variation, uncertainty=lambda batches: 0.0
    )


def decided(old: Settings, new: Settings, reason: Reason) -> Decision:
    return Decision(
        at=0.0, old=old, new=new, reason=reason, text="", evidence={}, predicted_rate=90.0, predicted_wait=0.1
    )


def trial(
    before: WindowRecord, *after: Sample, old: Settings = FOUR, new: Settings = EIGHT, reason: Reason = "too few"
) -> Evaluation:
    made = Evaluation(decided(old, new, reason), before, batches_needed=24)
    for sample in after:
        made.since.add(sample, sample.wait_s)
    return made


SLOW = record(*[window(10, 0.01)] * 4)


def test_a_record_adds_up() -> None:
    made = record(window(10, 0.01, head_s=0.02), window(30, 0.01))
    assert made.batches == 40
    assert made.rate == pytest.approx(50)
    assert made.wait == made.wait == pytest.approx(0.5)
    assert made.head == pytest.approx(0.02 / 0.8)
    assert made.busy == pytest.approx(40 * 0.02 / (4 * 0.8))
    assert made.loss() == pytest.approx((0.01, 0.0))


def test_a_record_without_its_first_seconds_keeps_what_an_error_needs() -> None:
    slow, fast = window(10, 0.02), window(20, 0.0)  # 0.3 s and 0.2 s
    made = record(slow, fast, fast, fast)
    assert made.after(0.3).rate == pytest.approx(100)
    assert made.after(0.31).batches == 40
    assert len(made.after(9.0)) == EVALUATION.least_windows
    assert len(made.after(0.0)) == len(made) == 4, "it is another record"


def test_the_error_is_that_of_the_mean_over_windows() -> None:
    loss, error = record(window(10, 0.0), window(10, 0.02)).loss()
    assert loss == pytest.approx(0.01)
    assert error == pytest.approx(0.01)  # two values 0.02 apart: a standard deviation of 0.0141, by the root of two


def test_one_slow_batch_more_or_less_is_the_least_error() -> None:
    assert record(*[window(10, 0.01)] * 4).loss(slowest_s=0.4)[1] == pytest.approx(0.4 / 40)


def test_growth_that_helps_is_kept_and_growth_that_does_not_is_not() -> None:
    helped, did_not = trial(SLOW, *[window(30, 0.001)] * 3), trial(SLOW, *[window(30, 0.01)] * 3)
    assert helped.is_over(work(), CONFIG)
    assert helped.was_good(work(), CONFIG)
    assert did_not.is_over(work(), CONFIG)
    assert not did_not.was_good(work(), CONFIG)


def test_a_slower_consumer_is_no_fault_of_the_loader() -> None:
    """Steps six times as long: the rate has fallen, and nothing is lost any more."""
    made = trial(SLOW, *[window(10, 0.0, step_s=0.06)] * 3)
    assert made.since.rate < made.before.rate / 2
    assert made.was_good(work(step_s=0.06), CONFIG)


def test_what_is_uncertain_is_kept_but_not_what_was_only_a_try() -> None:
    after = window(30, 0.012), window(30, 0.008), window(30, 0.011)
    assert trial(SLOW, *after).was_good(work(slowest_s=1.0), CONFIG)
    assert not trial(SLOW, *after, reason="explore").was_good(work(slowest_s=1.0), CONFIG)


@pytest.mark.parametrize(("variation", "kept"), [(0.1, False), (2.0, True)])
def test_prefetch_that_may_or_may_not_help_is_kept_only_where_batches_take_very_different_times(
    variation: float, kept: bool
) -> None:
    after = window(30, 0.012), window(30, 0.008), window(30, 0.011)
    deeper = replace(FOUR, prefetch=4 * FOUR.prefetch)
    made = trial(SLOW, *after, new=deeper, reason="spread")
    assert made.was_good(work(slowest_s=1.0, variation=variation), CONFIG) is kept


def test_it_takes_longer_where_it_is_uncertain_but_not_for_ever() -> None:
    made = trial(SLOW, *[window(15, 0.01)] * 2)
    assert not made.is_over(work(slowest_s=2.0), CONFIG)
    for _ in range(6):
        made.since.add(window(15, 0.01), 0.15)
    assert made.is_over(work(slowest_s=2.0), CONFIG)


def test_two_windows_are_the_least() -> None:
    made = trial(SLOW, window(30, 0.001))
    assert not made.is_over(work(), CONFIG)


def test_giving_back_is_undone_where_it_costs_more_than_the_least_gain() -> None:
    quick = record(*[window(30, 0.0)] * 4)
    costs, does_not = [window(30, 0.002)] * 3, [window(30, 0.0002)] * 3
    assert not trial(quick, *costs, old=EIGHT, new=FOUR, reason="too many").was_good(work(), CONFIG)
    assert trial(quick, *does_not, old=EIGHT, new=FOUR, reason="too many").was_good(work(), CONFIG)


@pytest.mark.parametrize("reason", ["limit", "lost"])
def test_what_had_to_be_is_good(reason: Reason) -> None:
    worse = [window(30, 0.1)] * 3
    assert trial(record(*[window(30, 0.0)] * 4), *worse, old=EIGHT, new=FOUR, reason=reason).was_good(work(), CONFIG)


def test_batches_that_do_not_come_are_the_worst_loss() -> None:
    nothing = replace(window(10, 0.01), batches=0)
    assert trial(SLOW, nothing, nothing).gain(work()) == (-1.0, 0.0)


def dearer(sample: Sample, factor: float, **local: float) -> Sample:
    """The window with batches that cost workers so many times as much."""
    pool = replace(sample.local, load_s=sample.local.load_s * factor, **local)
    return replace(sample, local=pool, machine=MachineSample(cpus=4.0))


@pytest.mark.parametrize(
    ("cpu_s", "chance", "good"),
    [
        pytest.param(0.0, 1.0, True, id="by chance"),
        pytest.param(0.0, 0.0, False, id="costs do not vary: a storage gives no more"),
        pytest.param(2.0, 0.05, False, id="full CPUs: workers are in each other's way"),
    ],
)
def test_more_workers_are_not_why_batches_are_dearer_if_it_may_be_chance(
    cpu_s: float, chance: float, good: bool
) -> None:
    after = [dearer(window(10, 0.02), 2.0, cpu_s=cpu_s) for _ in range(6)]
    assert trial(SLOW, *after).was_good(replace_uncertainty(work(), chance), CONFIG) is good


def test_an_error_of_batches_alike_is_larger_than_windows_show() -> None:
    alike = replace_uncertainty(work(), 0.2)
    steady = trial(SLOW, *[window(10, 0.01)] * 4)
    assert steady.gain(work())[1] == pytest.approx(0.0)
    assert steady.gain(alike)[1] > 0.1


def replace_uncertainty(known: Any, error: float) -> Any:
    known.uncertainty = lambda batches: error
    return known


def test_a_hopeless_try_is_broken_off_after_a_few_batches_and_a_decision_is_not() -> None:
    hopeless = [window(8, 0.04)]
    assert trial(SLOW, *hopeless, reason="explore").is_over(work(), CONFIG)
    assert not trial(SLOW, *hopeless, reason="too few").is_over(work(), CONFIG)
    assert not trial(SLOW, window(8, 0.01), reason="explore").is_over(work(), CONFIG)


def test_growth_whose_workers_only_queue_is_undone_however_uncertain_it_is() -> None:
    queued = [dearer(window(10, 0.01), 2.2) for _ in range(4)]
    uncertain = replace_uncertainty(work(), 0.2)
    assert trial(SLOW, *queued).shows_queueing(uncertain)
    assert not trial(SLOW, *queued).was_good(uncertain, CONFIG)
    assert not trial(SLOW, *[dearer(window(10, 0.01), 1.2)] * 4).shows_queueing(work())
    assert not trial(SLOW, *[dearer(window(10, 0.003), 2.2)] * 4).shows_queueing(work()), "it was faster all the same"


def test_growth_has_paid_off_if_each_worker_brought_half_of_what_those_before_bring() -> None:
    assert trial(SLOW, window(10, 0.003)).paid_off
    assert not trial(SLOW, window(10, 0.008)).paid_off


def test_where_workers_queue_as_many_are_kept_as_make_what_came() -> None:
    """Of ten workers, 61 batches a second at 20 ms each without a queue take two, and four were there before."""
    ten = Settings(local=10, prefetch=30)
    made = trial(SLOW, *[dearer(window(10, 0.0064), 2.4)] * 4, new=ten)
    assert made.knee() == Settings(local=4, prefetch=12)
    fast = trial(record(*[window(10, 0.0)] * 4), *[dearer(window(90, 0.0, step_s=0.003), 2.0)] * 4, new=ten)
    assert fast.knee() == Settings(local=7, prefetch=21)


def test_growth_is_over_as_soon_as_its_workers_surely_make_more() -> None:
    """Of batches that a step of the training loop makes wait, too: what counts is what the workers make."""
    paid, unsure = trial(SLOW, *[window(40, 0.0)] * 2), trial(SLOW, window(40, 0.0))
    paid.batches_needed = unsure.batches_needed = 10_000
    assert (paid.makes_more, unsure.makes_more) == (True, False)
    assert (paid.is_over(work(), CONFIG), unsure.is_over(work(), CONFIG)) == (True, False)
    assert paid.was_good(replace_uncertainty(work(), 5.0), CONFIG)
    assert not trial(SLOW, *[window(40, 0.0)] * 2, reason="explore").makes_more


def stalled(tickets: int, seconds: float, *, usual_s: float = 0.08, new: Settings = FORTY) -> Evaluation:
    """Many more workers, which made so few batches in that time that none was delivered; before it none had been
    either, and four workers took ``usual_s`` for a batch."""
    pool = PoolSample(running=new.workers, tickets=tickets, load_s=tickets * usual_s)
    after = Sample(at=0.0, seconds=seconds, settings=new, wait_s=seconds, head_s=seconds, local=pool)
    made = trial(WindowRecord(), after, new=new)
    made.usual_s = usual_s
    return made


@pytest.mark.parametrize(
    ("tickets", "seconds", "makes_less"),
    [
        pytest.param(4, 0.95, False, id="four would have made 47 batches, not one for each of 40 and some more"),
        pytest.param(4, 0.97, True, id="four would have made 48"),
        pytest.param(18, 0.97, True, id="18 are surely fewer than 60 % of that"),
        pytest.param(20, 0.97, False, id="20 are so by chance"),
    ],
)
def test_more_workers_that_make_less_than_fewer_did_are_undone(tickets: int, seconds: float, makes_less: bool) -> None:
    made = stalled(tickets, seconds)
    assert made.made_before == pytest.approx(50.0)
    assert made.makes_less(work()) is made.is_over(work(), CONFIG) is makes_less
    if makes_less:
        assert not made.was_good(work(), CONFIG)
        assert made.failure(work()).knee == FOUR


def test_workers_that_nobody_waits_for_are_not_said_to_make_less() -> None:
    made = stalled(4, 0.97)
    made.since = WindowRecord()
    made.since.add(Sample(at=0.0, seconds=0.97, settings=FORTY, batches=4, work_s=0.97), 0.0)
    assert not made.makes_less(work())


def test_costs_that_vary_by_chance_do_not_show_that_more_workers_make_less() -> None:
    assert not stalled(4, 0.97).makes_less(replace_uncertainty(work(), 2.0))
    assert stalled(4, 0.97).makes_less(replace_uncertainty(work(), 0.3))


def test_a_few_workers_more_are_not_said_to_make_less() -> None:
    assert not stalled(0, 9.0, new=Settings(local=5, prefetch=10)).makes_less(work())


@pytest.mark.parametrize(("tickets", "kept"), [(49, False), (51, True)])
def test_where_no_batch_had_been_delivered_growth_must_make_as_many(tickets: int, kept: bool) -> None:
    assert stalled(tickets, 1.0).was_good(work(), CONFIG) is kept


def test_batches_that_ended_first_do_not_make_the_past_cheaper_than_it_was() -> None:
    """Short batches end first: of those of the latest windows alone each seems to have taken 20 ms."""
    queued = trial(SLOW, *[dearer(window(10, 0.01), 2.2) for _ in range(4)])
    assert queued.shows_queueing(work())
    queued.usual_s = 0.04
    assert not queued.shows_queueing(work())


def test_what_lay_ready_does_not_make_the_past_better_than_it_was() -> None:
    """Of 40 batches delivered 10 were made meanwhile: each of these took 80 ms, and 50 ms since."""
    stocked = replace(window(40, 0.01), local=PoolSample(running=4, tickets=10, load_s=3.2))
    assert record(stocked).lived_on_stock_s == pytest.approx(0.08)
    assert record(window(40, 0.01)).lived_on_stock_s == 0.0
    assert trial(record(stocked, stocked), *[window(10, 0.04)] * 4).was_good(work(), CONFIG)


def test_dearer_batches_are_no_fault_of_greater_prefetch() -> None:
    """As many workers ask for no more at once than before."""
    deeper = replace(FOUR, prefetch=4 * FOUR.prefetch)
    after = [dearer(window(10, 0.025), 2.0, cpu_s=2.0) for _ in range(6)]
    assert trial(SLOW, *after, new=deeper, reason="spread").was_good(work(), CONFIG)
    assert not trial(SLOW, *after).was_good(work(), CONFIG)


def test_what_dearer_batches_do_not_explain_is_the_setting_s_fault() -> None:
    assert trial(SLOW, *[dearer(window(10, 0.19), 2.0)] * 3).is_worse_than_dearer
    assert not trial(SLOW, *[dearer(window(10, 0.05), 3.0)] * 3).is_worse_than_dearer
    assert not trial(SLOW, *[window(10, 0.19)] * 3, new=Settings(local=2, prefetch=4)).is_worse_than_dearer


def test_remote_workers_have_slowed_nothing_down_before_a_batch_tells() -> None:
    more = Settings(local=4, remote=4, prefetch=16)
    before = record(window(100, 0.01))
    assert not trial(before, new=more).was_slowed_by_remote
    assert not trial(before, window(100, 0.005), new=more).was_slowed_by_remote
    assert trial(before, window(100, 0.05), new=more).was_slowed_by_remote
    assert not trial(before, window(100, 0.05)).was_slowed_by_remote


def test_what_local_workers_make_before_remote_ones_have_tells_nothing_of_these() -> None:
    made = Evaluation(trial(SLOW).decision, SLOW, batches_needed=24, skipped_remote=24)
    here, far = window(50, 0.01), replace(window(10, 0.01), remote=PoolSample(running=4, tickets=12))
    for sample in (here, far, far):
        made.add(sample, sample.wait_s)
    assert not made.since.batches
    made.add(far, far.wait_s)
    assert made.since.batches == 10


def test_a_trial_of_remote_workers_that_make_nothing_begins_all_the_same() -> None:
    made = Evaluation(trial(SLOW).decision, SLOW, batches_needed=24, skipped_remote=24)
    sample = window(100, 0.01)
    windows = math.ceil(EVALUATION.patience_s / sample.seconds)
    for _ in range(windows):
        made.add(sample, sample.wait_s)
    assert not made.since.batches
    made.add(sample, sample.wait_s)
    assert made.since.batches == 100
