"""Where batches are waited for and the model knows nothing better: a small step, now and then. PURE.

The prefetch becomes greater if the model finds that the settings should be faster than they are. Otherwise, on a full
machine, there is one worker less (caches, memory), and on another there are some more (waiting that overlaps).
"""

from __future__ import annotations

from dataclasses import replace

from dpex.autotune import wording
from dpex.autotune.constants.trying import COMMON, EXPLORE, IN_PROCESS
from dpex.autotune.planner import expect
from dpex.autotune.policies.base import Suggestion, trial
from dpex.autotune.policies.in_process import computes
from dpex.autotune.policies.prefetch import deeper, is_starved_with_time_to_spare
from dpex.autotune.situation import Situation
from dpex.autotune.types import Settings


class TryPrefetch:
    """A greater prefetch."""

    name = "try prefetch"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        if not (_is_due(state) or _is_first(state)) or not is_starved_with_time_to_spare(state):
            return None
        if state.is_queueing or not _is_disappointing(state):
            return None
        return _trial(state, deeper(state))


class TryFewerOrMore:
    """Another number of local workers."""

    name = "try workers"

    def suggest(self, state: Situation) -> Suggestion | None:
        """See `Policy.suggest`."""
        if not _is_due(state) or not _may_help(state):
            return None
        wanted = _other_number(state)
        return None if wanted is None else _trial(state, wanted)


def _is_due(state: Situation) -> bool:
    """Whether batches are waited for, now too, and nothing was changed or tried for a while."""
    if not state.now.workers or state.sample.remote.unplaced or not state.is_starved:
        return False
    waits = state.recent.wait >= COMMON.starved and state.sample.wait_s >= COMMON.starved * state.sample.seconds
    return waits and state.at - max(state.explored_at, state.asked_at) >= state.explore_pause_s


def _is_first(state: Situation) -> bool:
    """Whether in-process loading is about to be tried, which is to be compared with the best that workers make, and
    nothing unknown was tried before. Waits are heavy-tailed: after so short a time they say little about the rate."""
    return not state.explored_at and state.recent.seconds >= IN_PROCESS.after_s and computes(state.unlimited)


def _is_disappointing(state: Situation) -> bool:
    """Whether the present settings are surely slower than the model finds that they should be."""
    surely = state.long_rate * (1.0 + EXPLORE.errors * state.rate_error)
    return surely < EXPLORE.disappointing * state.outlook.here.rate


def _may_help(state: Situation) -> bool:
    return _is_disappointing(state) or state.is_queueing or (state.is_full and state.is_crowded)


def _other_number(state: Situation) -> Settings | None:
    now, bounds = state.now, state.bounds
    if not now.local:
        return None
    step = 1 if state.is_full else max(1, now.local // EXPLORE.steps)
    local = now.local - step if state.is_full or state.is_queueing else now.local + step
    if not max(1, bounds.least_local) <= local <= bounds.local:
        return None
    prefetch = min(bounds.most_prefetch(local), max(now.prefetch, 2 * (local + now.remote)))
    return replace(now, local=local, prefetch=prefetch) if local + now.remote <= prefetch else None


def _trial(state: Situation, wanted: Settings) -> Suggestion | None:
    return trial(state, wanted, wording.trial(state.now, wanted, state.evidence)) if _is_cheap(state, wanted) else None


def _is_cheap(state: Situation, wanted: Settings) -> bool:
    """Whether the model thinks that it costs little to try. It knows nothing of what workers queue for."""
    if wanted == state.now:
        return False
    work = state.unlimited
    return state.is_queueing or expect(work, wanted).rate >= EXPLORE.hopeful * expect(work, state.now).rate
