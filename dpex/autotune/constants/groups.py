"""All groups of constants, by the part of the controller that they belong to. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from dpex.autotune.constants import Constants, Description
from dpex.autotune.constants.judging import EVALUATION, SETTLING
from dpex.autotune.constants.learning import CEILING, TRIALS
from dpex.autotune.constants.levels import CORRELATION, LEVEL
from dpex.autotune.constants.measuring import ESTIMATOR, GPU, LINK, MODEL
from dpex.autotune.constants.planning import LIMITS, OUTLOOK, PLANNER
from dpex.autotune.constants.trying import COMMON, EXPLORE, IN_PROCESS, PREFETCH
from dpex.autotune.constants.worker_count import GROW, SHRINK, WALLS

PARTS: Mapping[str, tuple[Constants, ...]] = {
    "When a policy suggests a change": (COMMON, WALLS, IN_PROCESS, GROW, SHRINK, PREFETCH, EXPLORE),
    "How a decision is judged": (SETTLING, EVALUATION, TRIALS, CEILING),
    "Which settings are compared": (LIMITS, PLANNER, OUTLOOK),
    "How windows become an estimate": (ESTIMATOR, GPU, LINK, MODEL),
    "What is noise, and what is a change of the work": (LEVEL, CORRELATION),
}


def described() -> dict[str, Description]:
    """All constants by name, as in "grow.votes"."""
    groups = (group for part in PARTS.values() for group in part)
    return {each.name: each for group in groups for each in group.described()}


def group_of(name: str) -> Constants:
    """The group of the constant of that name.

    Raises:
        KeyError: There is no such group.
    """
    groups = {group.group(): group for part in PARTS.values() for group in part}
    return groups[name.partition(".")[0]]
