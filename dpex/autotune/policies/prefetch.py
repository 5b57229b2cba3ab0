"""A greater prefetch where the queue of batches says that this is what is missing. PURE.

Where the training loop waits while workers have time to spare, the batches that are ready and those in flight tell why:

- *straggler*: later batches are ready, and only the next one in turn is not.
- *burst*: the queue was full at one time and is empty at another. Workers are fast enough, and rest while it is full:
  a longer queue holds what the next burst takes.
- *short queue*: nothing is ready, all that may be drawn is in flight, and there is hardly a ticket for each worker:
  batches are on their way, and those on their way count.

Where they tell nothing of the kind, workers are what is missing, or the cause is not known. The last two are looked at
where the GPU is timed; elsewhere the model's replay of the queue decides alone.
"""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.constants.trying import COMMON, PREFETCH
from dpex.autotune.planner import Plan
from dpex.autotune.policies.base import Suggestion
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings


def deeper(state: Situation) -> Settings:
    """The present settings with a much greater prefetch, as far as there is room for it."""
    now = state.now
    most = min(state.bounds.most_prefetch(now.local), PREFETCH.most_per_worker * now.workers)
    return replace(now, prefetch=min(most, PREFETCH.times * now.prefetch))


def is_starved_with_time_to_spare(state: Situation) -> bool:
    """Whether the training loop waits while workers idle: otherwise nobody has time to make more ahead."""
    is_starved = state.is_starved and state.recent.wait >= COMMON.starved
    return bool(state.now.workers) and not state.sample.remote.unplaced and is_starved and _has_time(state)


def _has_time(state: Situation) -> bool:
    return state.recent.busy < PREFETCH.busy


class Prefetch:
    """Where later batches were ready while the next one was not, and where the queue is at times full, or too short."""

    name = "prefetch"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        wanted = deeper(state)
        if not is_starved_with_time_to_spare(state):
            return None
        why, share = _why(state)
        if not why or wanted.prefetch <= state.now.prefetch:
            return None
        hope = state.recent.rate * (1.0 + share / 2)
        plan = Plan(settings=wanted, rate=hope, wait=state.evidence["wait"], flow=state.outlook.here.flow)
        return Suggestion(
            plan=plan,
            reason="spread",
            text=wording.longer_queue(state.now, wanted, why, hope),
            evidence={**state.evidence, **_queue(state)},
            is_exclusive=True,
        )


def _why(state: Situation) -> tuple[str, float]:
    """Why a longer queue may help, in words, and for which share of the time; "" if nothing says so."""
    recent = state.recent
    if recent.batches < 2 * EVALUATION.least_batches:
        return "", 0.0
    if _is_out_of_turn(state):
        return wording.out_of_turn(recent.head), recent.head
    if not state.felt.is_gpu:
        return "", 0.0
    if _is_burst(state):
        return wording.burst(recent.fullest, state.now.prefetch), recent.lost
    return (wording.SHORT_QUEUE, recent.lost) if _is_short(state) else ("", 0.0)


def _queue(state: Situation) -> dict[str, float]:
    recent = state.recent
    return {"head": recent.head, "fullest": float(recent.fullest), "in_flight": recent.in_flight}


def _is_out_of_turn(state: Situation) -> bool:
    recent = state.recent
    return recent.head > max(PREFETCH.out_of_turn, recent.wait / PREFETCH.waits_per_one_out_of_turn)


def _is_burst(state: Situation) -> bool:
    return state.recent.fullest >= PREFETCH.full * state.now.prefetch


def _is_short(state: Situation) -> bool:
    now, recent = state.now, state.recent
    is_empty = recent.fullest <= PREFETCH.empty * now.prefetch
    is_drawn = recent.in_flight >= PREFETCH.full * now.prefetch
    return is_empty and is_drawn and now.prefetch <= PREFETCH.short * now.workers
