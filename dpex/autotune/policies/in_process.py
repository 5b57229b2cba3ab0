"""Make batches in the training process where a moment of it costs little, and nobody knows that it is slower. PURE.

What workers measure says little about it: there they are in each other's way for caches and memory, hand batches over,
and have one thread each for what may use several. It says least where batches are only copied.
"""

from __future__ import annotations

from dpex.autotune import wording
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.constants.trying import IN_PROCESS
from dpex.autotune.model import Estimate
from dpex.autotune.planner import Plan, expect
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings

_ALONE = Settings(prefetch=1)


class InProcessFirst:
    """Before another change is made, where batches are only copied or cost next to nothing."""

    name = "in-process first"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        if state.outlook.best.settings == state.now:
            return None
        is_likely = state.is_copying or _costs_nothing(state.work)
        return _suggestion(state) if is_likely else None


class InProcess:
    """Once nothing else is better by the model, and all workers are in their place."""

    name = "in-process"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        return None if state.sample.remote.unplaced else _suggestion(state)


def _suggestion(state: Situation) -> Suggestion | None:
    plan = _plan(state) if state.now.workers and state.is_starved else None
    if plan is None:
        return None
    text = wording.trial_in_process(state.now, plan.settings, plan.rate, state.evidence)
    return Suggestion(plan=plan, reason="explore", text=text, evidence=state.evidence)


def _plan(state: Situation) -> Plan | None:
    if state.bounds.least_local or state.bounds.least_remote or state.now.remote or not _is_seen_enough(state):
        return None
    work, plan = state.unlimited, expect(state.unlimited, _ALONE)
    may_be_as_fast = _costs_nothing(work) or plan.rate >= _least_share(state) * state.recent.rate
    return plan if _is_cheap(work) and may_be_as_fast else None


def _is_seen_enough(state: Situation) -> bool:
    recent = state.recent
    if recent.windows >= IN_PROCESS.windows and recent.seconds >= IN_PROCESS.after_s:
        return True
    return (
        _costs_nothing(state.unlimited)
        and recent.batches >= IN_PROCESS.many_batches
        and recent.windows >= IN_PROCESS.windows_if_free
    )


def _costs_nothing(work: Estimate) -> bool:
    """Whether making a batch takes the training loop's thread no longer than taking one over from a worker does, or
    hardly more.

    Then it cannot be slower, however many others want the CPUs: they hold up the same thread. What the model expects of
    it says little, as what workers need for such a batch is mostly the way to the next one.
    """
    return work.here_s <= max(IN_PROCESS.free_s, work.own_s)


def _is_cheap(work: Estimate) -> bool:
    """Whether a trial takes little time, and the training process would not mostly wait in it."""
    trial_s = work.here_s * EVALUATION.least_batches
    return trial_s < IN_PROCESS.longest_trial_s and computes(work)


def computes(work: Estimate) -> bool:
    """Whether a batch waits for no more than a small part of its time."""
    return work.wait_s < IN_PROCESS.most_waiting * work.here_s


def _least_share(state: Situation) -> float:
    """The part of the present rate that the model must expect of it."""
    if state.is_copying:
        return IN_PROCESS.least_if_copying
    return IN_PROCESS.least_if_full if state.is_full else IN_PROCESS.least
