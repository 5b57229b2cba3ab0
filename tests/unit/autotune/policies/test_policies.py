"""Each policy alone: from a situation to a suggestion."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dpex.autotune import wording
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.evaluation import FailedTrial
from dpex.autotune.failed_changes import TO_IN_PROCESS, Change
from dpex.autotune.felt import FeltSample
from dpex.autotune.planner import Bounds
from dpex.autotune.policies import POLICIES
from dpex.autotune.policies.base import Policy, Suggestion
from dpex.autotune.policies.explore import TryFewerOrMore, TryPrefetch
from dpex.autotune.policies.grow import Grow
from dpex.autotune.policies.in_process import InProcess, InProcessFirst
from dpex.autotune.policies.prefetch import Prefetch
from dpex.autotune.policies.shrink import Shrink
from dpex.autotune.policies.straggler import Straggler
from dpex.autotune.policies.undo import Undo
from dpex.autotune.policies.walls import NoPlace, Walls
from dpex.autotune.types import Decision, Settings
from dpex.measure.samples import PoolSample
from tests.unit.autotune.policies.situations import EIGHT, FOUR, plan, sample, situation

IN_PROCESS = Settings(prefetch=1)
TWO = Settings(local=2, prefetch=4)


def suggested(policy: Policy, **state: Any) -> Suggestion:
    found = policy.suggest(situation(**state))
    assert found is not None
    return found


def silent(policy: Policy, **state: Any) -> bool:
    return policy.suggest(situation(**state)) is None


def test_nobody_suggests_anything_where_nothing_is_lost_and_nothing_is_better() -> None:
    content = situation(recent={"lost": 0.0, "wait": 0.0})
    assert [policy.suggest(content) for policy in POLICIES] == [None] * len(POLICIES)


def test_policies_have_names_of_their_own_and_keep_nothing() -> None:
    assert len({policy.name for policy in POLICIES}) == len(POLICIES)
    assert all(not vars(policy) for policy in POLICIES)


def test_a_suggestion_says_what_it_changes() -> None:
    """With its own words, both settings and the evidence; whichever of the policies makes it."""
    states = (
        situation(best=plan(EIGHT, 90.0)),
        situation(EIGHT, best=plan(FOUR, 60.0)),
        situation(recent={"head": 0.1}),
        situation(here=plan(FOUR, 90.0)),
    )
    found = [policy.suggest(state) for state in states for policy in POLICIES]
    made = [each for each in found if each is not None]
    assert {each.reason for each in made} == {"too few", "too many", "spread", "explore"}
    for each in made:
        assert wording.named(each.plan.settings) in each.text
        assert each.evidence["rate"] == 60.0


# -- grow --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rate", "recent", "is_faster"),
    [
        pytest.param(80.0, {}, True, id="a third faster"),
        pytest.param(62.5, {}, True, id="by the gain that is needed"),
        pytest.param(62.0, {}, False, id="by less"),
        pytest.param(62.5, {"rate": 62.0}, False, id="by less than what was measured"),
    ],
)
def test_growth_must_promise_a_gain(rate: float, recent: dict[str, Any], is_faster: bool) -> None:
    assert silent(Grow(), best=plan(EIGHT, rate), recent=recent) is not is_faster


@pytest.mark.parametrize(
    ("rate", "state", "votes"),
    [
        pytest.param(66.0, {}, 3, id="little"),
        pytest.param(80.0, {}, 2, id="much"),
        pytest.param(130.0, {}, 1, id="very much"),
        pytest.param(66.0, {"tickets": 99}, 1, id="new work"),
        pytest.param(66.0, {"window": {"at": 0.9}}, 2, id="in the first second"),
    ],
)
def test_the_less_there_is_to_gain_the_more_windows_must_agree(rate: float, state: dict[str, Any], votes: int) -> None:
    assert suggested(Grow(), best=plan(EIGHT, rate), **state).votes == votes


@pytest.mark.parametrize(
    ("now", "wanted", "reason"),
    [
        (FOUR, EIGHT, "too few"),
        (EIGHT, TWO, "too many"),
        (FOUR, IN_PROCESS, "in-process"),
        (FOUR, replace(FOUR, prefetch=16), "spread"),
        (FOUR, Settings(local=2, remote=2, prefetch=8), "elsewhere"),
    ],
)
def test_the_reason_of_a_faster_setting(now: Settings, wanted: Settings, reason: str) -> None:
    slow = {"cpu_s": 0.0, "wait_s": 1.0}  # so that the workers that there are make no difference
    assert suggested(Grow(), now=now, best=plan(wanted, 900.0), work=slow).reason == reason


def test_workers_that_are_there_stay_while_that_is_as_fast() -> None:
    remote = Settings(local=2, remote=2, prefetch=8)
    found = suggested(Grow(), best=plan(remote, 70.0), bounds=Bounds(local=16, remote=4, prefetch=64))
    assert found.plan.settings == Settings(local=4, remote=2, prefetch=8)
    assert found.wanted.settings == remote


def test_where_nobody_knows_who_queues_the_step_is_half_the_way() -> None:
    sixteen = plan(Settings(local=16, prefetch=32), 90.0)
    unknown = {"local": PoolSample(requested=4, running=4, tickets=60, load_s=3.9, cpu_s=3.8)}
    assert suggested(Grow(), best=sixteen).plan.settings.local == 16
    found = suggested(Grow(), best=sixteen, window=unknown)
    assert (found.plan.settings, found.wanted) == (Settings(local=8, prefetch=16), sixteen)


def test_batches_that_are_too_few_do_not_make_room_for_workers() -> None:
    fewer = plan(Settings(local=8, prefetch=6), 90.0)
    bounds = Bounds(local=16, remote=0, prefetch=6)
    waits = {"best": fewer, "bounds": bounds, "work": {"cpu_s": 0.0}}
    assert suggested(Grow(), **waits, recent={"head": 0.02}).put_off == ""
    assert suggested(Grow(), **waits, recent={"head": 0.04}).put_off == wording.PREFETCH_IS_NEEDED


@pytest.mark.parametrize(
    ("now", "asked_at", "disproved"),
    [
        pytest.param(FOUR, 96.0, Change("fewer local", 4), id="lasted"),
        pytest.param(FOUR, 97.0, None, id="had not lasted"),
        pytest.param(IN_PROCESS, 99.0, TO_IN_PROCESS, id="the training process alone"),
    ],
)
def test_what_was_enough_and_is_too_little_now_is_remembered(
    now: Settings, asked_at: float, disproved: Change | None
) -> None:
    assert suggested(Grow(), now=now, best=plan(EIGHT, 90.0), asked_at=asked_at).disproves == disproved


@pytest.mark.parametrize(
    ("wait_s", "wanted", "taken"),
    [
        pytest.param(0.5, Settings(local=64, prefetch=128), Settings(local=32, prefetch=64), id="half of it"),
        pytest.param(0.5, Settings(local=32, prefetch=64), Settings(local=32, prefetch=64), id="eight times as many"),
        pytest.param(0.08, Settings(local=64, prefetch=128), Settings(local=64, prefetch=128), id="much is computed"),
        pytest.param(
            0.5,
            Settings(local=24, remote=40, prefetch=128),
            Settings(local=24, remote=8, prefetch=64),
            id="local ones first",
        ),
    ],
)
def test_where_batches_mostly_wait_growth_does_not_go_too_far_at_once(
    wait_s: float, wanted: Settings, taken: Settings
) -> None:
    found = suggested(Grow(), best=plan(wanted, 900.0), work={"wait_s": wait_s})
    assert found.plan.settings == taken
    assert found.towards is not None
    assert found.towards.settings == wanted


def test_growth_speaks_against_giving_back() -> None:
    found = suggested(Grow(), best=plan(EIGHT, 90.0))
    assert found.is_exclusive
    assert found.contradicts == Shrink.name


# -- shrink ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wanted", "rate", "state", "is_less"),
    [
        pytest.param(Settings(local=7, prefetch=16), 60.0, {}, True, id="one of eight"),
        pytest.param(Settings(local=7, prefetch=16), 59.0, {}, False, id="one of eight, and slower"),
        pytest.param(Settings(local=6, prefetch=16), 58.0, {}, True, id="a quarter may cost some percent"),
        pytest.param(Settings(local=6, prefetch=16), 57.0, {}, False, id="but not more"),
        pytest.param(Settings(local=8, prefetch=8), 60.0, {"batch_bytes": 1e7}, True, id="80 MB of batches"),
        pytest.param(Settings(local=8, prefetch=9), 60.0, {"batch_bytes": 1e8}, False, id="less than half of them"),
        pytest.param(Settings(local=8, prefetch=8), 60.0, {"batch_bytes": 1e6}, False, id="8 MB of batches"),
    ],
)
def test_what_is_given_back_must_be_worth_it_and_cost_nothing(
    wanted: Settings, rate: float, state: dict[str, Any], is_less: bool
) -> None:
    assert silent(Shrink(), now=EIGHT, best=plan(wanted, rate), here=plan(EIGHT, 60.0), **state) is not is_less


@pytest.mark.parametrize(
    ("capacity", "state", "votes"),
    [
        pytest.param(149.0, {}, 4, id="enough"),
        pytest.param(150.0, {}, 2, id="ample"),
        pytest.param(149.0, {"variation": 0.6}, 8, id="spread"),
        pytest.param(150.0, {"changed_at": (80.0, 90.0)}, 8, id="restless"),
        pytest.param(149.0, {"config": AutotuneConfig(shrink_after=10)}, 10, id="as the user says"),
    ],
)
def test_the_less_sure_it_is_the_more_windows_must_agree(capacity: float, state: dict[str, Any], votes: int) -> None:
    assert suggested(Shrink(), now=EIGHT, best=plan(FOUR, 60.0, capacity=capacity), **state).votes == votes


@pytest.mark.parametrize(
    ("state", "put_off"),
    [
        ({}, ""),
        ({"asked_at": 99.0}, wording.JUST_CHANGED),
        ({"tickets": 99}, wording.NOT_SEEN_ENOUGH),
        ({"variation": 0.3}, ""),
        ({"variation": 0.3, "tickets": 299}, wording.NOT_SEEN_ENOUGH),
        ({"variation": 0.3, "changed_at": (91.0,)}, wording.NOT_SEEN_ENOUGH),
    ],
)
def test_uneven_work_must_be_seen_for_longer(state: dict[str, Any], put_off: str) -> None:
    assert suggested(Shrink(), now=EIGHT, best=plan(FOUR, 60.0), **state).put_off == put_off


def test_the_largest_of_what_windows_found_enough_is_kept_with_its_prefetch() -> None:
    five = plan(Settings(local=5, prefetch=10), 60.0)
    found = suggested(Shrink(), now=EIGHT, best=plan(FOUR, 60.0), agreed={"shrink": (five,)})
    assert found.plan.settings == Settings(local=5, prefetch=16)
    assert found.wanted.settings == FOUR


# -- in-process --------------------------------------------------------------------------------------------------------

TINY: dict[str, Any] = {"here_s": 0.002, "cpu_s": 0.002, "wait_s": 0.0, "step_s": 0.001}


@pytest.mark.parametrize(
    ("state", "is_tried"),
    [
        pytest.param({}, True, id="333 a second, of 60"),
        pytest.param({"recent": {"rate": 450.0}}, False, id="of 450: less than three quarters"),
        pytest.param({"recent": {"rate": 450.0}, "window": {"machine": {"trainer_cpu_s": 3.0}}}, True, id="full CPUs"),
        pytest.param({"recent": {"rate": 1000.0}, "batch_bytes": 1e7}, True, id="copying"),
        pytest.param({"work": {**TINY, "here_s": 0.03}}, False, id="a trial takes too long"),
        pytest.param({"work": {**TINY, "wait_s": 0.001}}, False, id="it would mostly wait"),
        pytest.param({"recent": {"lost": 0.02}}, False, id="nothing is lost"),
        pytest.param({"recent": {"windows": 2, "seconds": 0.2}}, False, id="not seen enough"),
        pytest.param({"bounds": Bounds(local=4, remote=0, prefetch=9, least_local=1)}, False, id="not allowed"),
        pytest.param({"now": Settings(local=2, remote=1)}, False, id="remote workers"),
        pytest.param({"window": {"remote": PoolSample(unplaced=1)}}, False, id="workers without a place"),
        pytest.param({"now": IN_PROCESS}, False, id="it is so already"),
    ],
)
def test_in_process_is_tried_where_it_is_cheap_and_may_be_faster(state: dict[str, Any], is_tried: bool) -> None:
    assert silent(InProcess(), **{"work": TINY} | state) is not is_tried


@pytest.mark.parametrize(
    ("work", "is_tried"),
    [
        pytest.param({"here_s": 0.00015, "own_s": 0.0002}, True, id="taking one over takes as long"),
        pytest.param({"here_s": 0.00015, "own_s": 0.0001}, False, id="making one takes longer"),
        pytest.param({"here_s": 0.00008, "own_s": 0.00001}, True, id="next to nothing"),
    ],
)
def test_what_costs_nothing_is_tried_here_whatever_the_model_expects_on_a_busy_machine(
    work: dict[str, Any], is_tried: bool
) -> None:
    recent = {"windows": 2, "seconds": 0.2, "batches": 900, "rate": 1e6}
    state = {"work": {**TINY, "cpu_s": 0.0003, "step_s": 0.0, **work}, "recent": recent}
    assert silent(InProcess(), **state) is not is_tried
    assert silent(InProcessFirst(), best=plan(EIGHT, 90.0), **state) is not is_tried


def test_in_process_comes_first_only_where_batches_are_copied_or_cost_nothing() -> None:
    other = {"best": plan(EIGHT, 90.0)}
    assert silent(InProcessFirst(), **other, work=TINY)
    assert suggested(InProcessFirst(), **other, work=TINY, batch_bytes=1e7).plan.settings == IN_PROCESS
    free = {**TINY, "here_s": 0.00005}
    soon = {"windows": 2, "seconds": 0.1, "batches": 100}
    assert suggested(InProcessFirst(), **other, work=free, recent=soon).reason == "explore"
    assert silent(InProcessFirst(), work=free), "nothing else is about to be done"


# -- prefetch ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "prefetch"),
    [
        pytest.param({"recent": {"head": 0.05}}, 32, id="four times"),
        pytest.param({"recent": {"head": 0.05}, "now": replace(FOUR, prefetch=64)}, 128, id="32 for each worker"),
        pytest.param({"recent": {"head": 0.05}, "bounds": Bounds(local=9, remote=0, prefetch=12)}, 12, id="the limit"),
        pytest.param({"recent": {"head": 0.03}}, None, id="hardly ever out of turn"),
        pytest.param({"recent": {"head": 0.05, "wait": 0.2}}, None, id="mostly waiting for any batch"),
        pytest.param({"recent": {"head": 0.05, "batches": 47}}, None, id="too few batches"),
        pytest.param({"recent": {"head": 0.05, "busy": 0.94}}, None, id="workers have no time"),
        pytest.param({"recent": {"head": 0.05}, "bounds": Bounds(local=9, remote=0, prefetch=8)}, None, id="no room"),
    ],
)
def test_prefetch_grows_where_only_the_next_batch_is_missing(state: dict[str, Any], prefetch: int | None) -> None:
    found = Prefetch().suggest(situation(**state))
    assert (found and found.plan.settings.prefetch) == prefetch


@pytest.mark.parametrize(
    ("queue", "why"),
    [
        pytest.param({"head": 0.05, "fullest": 7}, "the next batch in order", id="straggler"),
        pytest.param({"fullest": 6, "in_flight": 3.0}, "6 of 8 batches are ready at another", id="burst"),
        pytest.param({"fullest": 0, "in_flight": 6.5}, "no ticket", id="short queue"),
        pytest.param({"fullest": 3, "in_flight": 5.0}, None, id="a queue that says nothing"),
        pytest.param({"fullest": 6, "busy": 0.94}, None, id="a burst for which workers have no time"),
        pytest.param({"fullest": 0, "in_flight": 8.0, "busy": 0.94}, None, id="workers are what is missing"),
    ],
)
@pytest.mark.parametrize("signal", ["events", "nvml"])
def test_the_queue_of_batches_tells_a_straggler_a_burst_and_a_short_queue_apart(
    queue: dict[str, Any], why: str | None, signal: Any
) -> None:
    """The same loss each time; without the queue nobody would suggest anything."""
    found = Prefetch().suggest(situation(recent=queue, felt=FeltSample(sample=sample(), signal=signal)))
    assert (found is not None and why is not None and why in found.text) or found is why
    if found is not None:
        assert found.plan.settings == replace(FOUR, prefetch=32)
        assert (found.evidence["fullest"], found.reason) == (queue["fullest"], "spread")


def test_a_long_queue_is_no_short_one_and_a_loops_own_waits_say_nothing_of_bursts() -> None:
    gpu = FeltSample(sample=sample(), signal="events")
    long = replace(FOUR, prefetch=9)
    assert silent(Prefetch(), now=long, recent={"fullest": 0, "in_flight": 9.0}, felt=gpu)
    assert silent(Prefetch(), recent={"fullest": 0, "in_flight": 8.0})
    assert silent(Prefetch(), recent={"fullest": 8})


def test_behind_a_straggler_prefetch_grows_at_once() -> None:
    assert silent(Straggler())
    found = suggested(Straggler(), held_up_s=5.0)
    assert (found.plan.settings, found.is_forced, found.put_off) == (replace(FOUR, prefetch=32), True, "")
    assert "5.0 s" in found.text
    full = suggested(Straggler(), held_up_s=5.0, bounds=Bounds(local=9, remote=0, prefetch=8))
    assert full.put_off == wording.NO_ROOM_FOR_PREFETCH


# -- trials ------------------------------------------------------------------------------------------------------------

DISAPPOINTING = plan(FOUR, 70.0)
FULL = {"machine": {"trainer_cpu_s": 3.0}}


@pytest.mark.parametrize(
    ("state", "prefetch"),
    [
        pytest.param({}, 32, id="slower than it should be"),
        pytest.param({"here": plan(FOUR, 63.0)}, None, id="as fast as it should be"),
        pytest.param({"rate_error": 0.1}, None, id="or nobody knows"),
        pytest.param({"asked_at": 81.0}, None, id="a change not long ago"),
        pytest.param({"explored_at": 81.0}, None, id="a trial not long ago"),
        pytest.param({"window": {"wait_s": 0.02}}, None, id="no wait in this window"),
        pytest.param({"is_queueing": True}, None, id="workers queue"),
        pytest.param({"recent": {"busy": 0.94}}, None, id="workers have no time"),
    ],
)
def test_a_greater_prefetch_is_tried_where_the_model_is_disappointed(
    state: dict[str, Any], prefetch: int | None
) -> None:
    found = TryPrefetch().suggest(situation(**{"here": DISAPPOINTING} | state))
    assert (found and found.plan.settings.prefetch) == prefetch


COMPUTING = {"cpu_s": 0.05, "wait_s": 0.0, "here_s": 0.05}


@pytest.mark.parametrize(
    ("state", "is_tried"),
    [
        pytest.param({}, True, id="a second has shown what workers bring"),
        pytest.param({"recent": {"seconds": 0.9}}, False, id="not a second yet"),
        pytest.param({"explored_at": 95.0}, False, id="something was tried before: there is a pause"),
        pytest.param({"work": {"cpu_s": 0.03, "wait_s": 0.02}}, False, id="waits: a second says little"),
    ],
)
def test_the_first_longer_queue_is_tried_soon(state: dict[str, Any], is_tried: bool) -> None:
    just_started = {"here": DISAPPOINTING, "asked_at": 99.0, "explored_at": 0.0, "work": COMPUTING}
    assert silent(TryPrefetch(), **{**just_started, **state}) is not is_tried


@pytest.mark.parametrize(
    ("state", "local"),
    [
        pytest.param({}, 5, id="one more for four"),
        pytest.param({"now": EIGHT, "here": plan(EIGHT, 70.0)}, 10, id="two more for eight"),
        pytest.param({"window": FULL}, 3, id="one less on a full machine"),
        pytest.param({"is_queueing": True}, 3, id="fewer where they queue"),
        pytest.param({"here": plan(FOUR, 60.0)}, None, id="nothing speaks for it"),
        pytest.param({"here": plan(FOUR, 60.0), "window": FULL, "is_crowded": True}, 3, id="in each other's way"),
        pytest.param({"bounds": Bounds(local=4, remote=0, prefetch=99)}, None, id="no more are allowed"),
        pytest.param({"bounds": Bounds(local=9, remote=0, prefetch=4)}, None, id="no batches for more"),
    ],
)
def test_another_number_of_workers_is_tried(state: dict[str, Any], local: int | None) -> None:
    """On a full machine of two CPUs' worth of work the model must not think that one less costs a tenth."""
    light = {"work": {"step_s": 0.05}}
    found = TryFewerOrMore().suggest(situation(**{"here": DISAPPOINTING} | light | state))
    assert (found and found.plan.settings.local) == local


def test_no_trial_that_the_model_expects_to_be_dear() -> None:
    assert silent(TryFewerOrMore(), here=DISAPPOINTING, window=FULL, work={"step_s": 0.001})


# -- what must be ------------------------------------------------------------------------------------------------------


def test_what_exceeds_the_limits_goes_back_within_them() -> None:
    assert silent(Walls())
    found = suggested(Walls(), config=AutotuneConfig(max_local=2, max_prefetch=5))
    assert (found.plan.settings, found.reason, found.is_forced) == (Settings(local=2, prefetch=5), "limit", True)
    little = {"machine": {"memory_free": -(10**8), "worker_bytes": 1e8}}
    assert suggested(Walls(), window=little).plan.settings.local == 2


@pytest.mark.parametrize(("granted", "remote"), [(None, None), (9, None), (4, None), (3, 3), (0, 0)])
def test_what_other_loaders_need_more_is_given_back(granted: int | None, remote: int | None) -> None:
    now = Settings(local=4, remote=4, prefetch=16)
    window = {"remote": PoolSample(requested=4, running=4, room=0, granted=granted)}
    most = 4 if granted is None else min(4, granted)
    found = Walls().suggest(situation(now=now, bounds=Bounds(local=4, remote=most, prefetch=99), window=window))
    assert (found is not None) is (remote is not None)
    if found is not None:
        assert (found.plan.settings.remote <= (remote or 0), found.reason, found.is_forced) == (True, "limit", True)
        assert found.evidence["granted"] == granted
        assert f"because {granted} of the cluster's workers are this loader's share" in found.text


@pytest.mark.parametrize(("windows", "room", "is_lost"), [(1, 2, False), (2, 2, True), (2, 4, False)])
def test_remote_workers_without_a_place_are_given_up(windows: int, room: int, is_lost: bool) -> None:
    now = Settings(local=4, remote=4, prefetch=16)
    state = {"now": now, "bounds": Bounds(local=8, remote=room, prefetch=99), "unplaced_windows": windows}
    found = NoPlace().suggest(situation(**state, window={"remote": PoolSample(requested=4, unplaced=2, room=0)}))
    assert (found is not None) is is_lost
    assert found is None or (found.reason, found.evidence["unplaced"]) == ("lost", 2.0)


def failed(knee: Settings | None = None) -> FailedTrial:
    decision = Decision(
        at=90.0, old=FOUR, new=EIGHT, reason="too few", text="", evidence={}, predicted_rate=90.0, predicted_wait=0.1
    )
    return FailedTrial(
        decision=decision,
        rate_before=60.0,
        rate_since=58.0,
        lost_before=0.4,
        cost_before_s=0.05,
        cost_since_s=0.1,
        gain=-0.03,
        error=0.01,
        knee=knee,
    )


def test_what_failed_is_undone() -> None:
    assert silent(Undo())
    found = suggested(Undo(), now=EIGHT, failed=failed())
    assert (found.plan.settings, found.plan.rate, found.reason) == (FOUR, 60.0, "undo")
    assert found.evidence == {"rate_before": 60.0, "rate_after": 58.0}
    assert "3.0 % slower" in found.text


def test_where_workers_queue_as_many_stay_as_get_as_much() -> None:
    five = Settings(local=5, prefetch=10)
    found = suggested(Undo(), now=EIGHT, failed=failed(knee=five))
    assert found.plan.settings == five
    assert "storage" in found.text
