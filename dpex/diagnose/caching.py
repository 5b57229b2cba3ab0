"""The part of a sample that `dpex.cached` can keep, as far as the timed steps show. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from dpex.diagnose.facts import WITHIN, Facts
from dpex.measure.readable import percent


@dataclass(frozen=True, kw_only=True)
class CachablePart:
    """The part of a sample that is the same in each epoch, as far as is known.

    Attributes:
        change: What to do, in words.
        wall_s: Wall seconds of that part, of all batches.
        cpu_s: CPU seconds of it.
        is_divided: Another dataset is needed for it.
    """

    change: str
    wall_s: float
    cpu_s: float
    is_divided: bool = False


def cachable(facts: Facts) -> CachablePart | None:
    """Return what a cache can keep: all before the first part that draws random numbers. A part is a step of the
    dataset's Compose, or another step of the dataset. None: nothing, or no batch was timed to see what draws."""
    steps = {_path(one.name): one for one in facts.transforms if not one.is_collating}
    drawing = [path for path, one in steps.items() if one.drawing]
    if facts.compose is None or () not in steps or () in drawing:
        return None
    compose = facts.compose[:1]

    def part(path: tuple[str, ...]) -> tuple[str, ...]:
        return path[:2] if path[:1] == compose else path[:1]

    heads = [path[:1] for path in steps]
    parts = sorted(dict.fromkeys(map(part, steps)), key=lambda one: heads.index(one[:1]))
    first = min((parts.index(part(path)) for path in drawing), default=len(parts))
    kept = parts[:first]
    if drawing and kept[-1] and kept[-1] == compose == parts[first][:1]:  # of which no step is left
        kept.pop()
    known = [one for path, one in steps.items() if part(path) in kept]
    wall_s, cpu_s = sum(one.all_wall_s for one in known), sum(one.all_cpu_s for one in known)
    if not drawing:
        return CachablePart(change="`dpex.cached(dataset)`", wall_s=wall_s, cpu_s=cpu_s)
    dataset = f"of the steps up to `{kept[-1][-1]}`" if kept[-1] else "without its transforms"
    share = percent(wall_s / max(1e-12, sum(one.all_wall_s for one in steps.values())))
    change = f"`dpex.cached` around a dataset {dataset} ({share} of a sample), and the rest in another around it"
    return CachablePart(change=change, wall_s=wall_s, cpu_s=cpu_s, is_divided=True)


def _path(name: str) -> tuple[str, ...]:
    """Return the names of a step and of those around it, without the datasets that they lie in."""
    within = name.split(WITHIN)[1:]
    while within and ".__" in within[0]:
        within.pop(0)
    return tuple(within)
