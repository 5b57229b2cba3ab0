"""The part of loading a sample that `dpex.cached` can cache, according to the timed calls. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dpex.diagnose.facts import Facts
from dpex.diagnose.hot_calls import CallBranch, trees
from dpex.measure.batch_times import OWN_CODE
from dpex.measure.readable import percent


@dataclass(frozen=True, kw_only=True)
class CachablePart:
    """The part of loading a sample that draws no random numbers, as far as the timed calls show.

    Attributes:
        change: The change of the user's code, as text.
        wall_s: Wall seconds of that part in all batches.
        cpu_s: CPU seconds of that part in all batches.
        is_divided: True if the dataset must be divided in two, so that only this part is cached.
    """

    change: str
    wall_s: float
    cpu_s: float
    is_divided: bool = False


def cachable(facts: Facts) -> CachablePart | None:
    """Return the part of loading a sample that precedes the first call that draws random numbers.

    None if there is no such part, or if no batch was timed.
    """
    root = next((one for one in trees(facts) if not one.fact.is_collating), None)
    if not facts.is_cachable or root is None:
        return None
    rows = list(root.walk())
    first = next((one for one in rows if one.fact.drawing), None)
    if first is None:
        return CachablePart(change="`dpex.cached(dataset)`", wall_s=root.all_wall_s, cpu_s=root.all_cpu_s)
    around = list(first.around)
    kept = [one for one in rows[: rows.index(first)] if one not in around and not _is_own_code(one, around)]
    if not kept:
        return None
    wall_s, cpu_s = sum(one.fact.all_wall_s for one in kept), sum(one.fact.all_cpu_s for one in kept)
    at = next(one for one in reversed(around) if not any(one in each.around for each in kept))
    share = percent(wall_s / max(1e-12, root.all_wall_s))
    change = (
        f"`dpex.cached` around a dataset that ends before `{at.name}`{f' {at.place}' if at.is_of_user else ''} "
        f"({share} of a sample), and the rest in another around it"
    )
    return CachablePart(change=change, wall_s=wall_s, cpu_s=cpu_s, is_divided=True)


def _is_own_code(one: CallBranch, around: list[CallBranch]) -> bool:
    """Return True for the own code of a function that leads to the first draw. Part of it may run after the draw."""
    return one.name == OWN_CODE and one.caller in around
