"""The constants of the controller, each with its meaning, unit, range and reason. PURE.

Users set `dpex.autotune.config.AutotuneConfig`. What stands here was found by measuring: on real machines, and in the
simulator. `docs/reference/controller-constants.md` is made from these descriptions, and says which scenario of the
simulator gets worse without each constant (`python -m benchmarks.simulation.without`).

- `worker_count`: when the number of workers changes
- `trying`: when something is tried that the model does not know
- `judging`: when it is known what a decision brought
- `learning`: what a trial teaches, and what queues on a link say
- `planning`: which settings are compared
- `measuring`: how windows become an estimate of the work
- `levels`: what is noise, and what is a change of the work
- `groups`: all of them
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

_T = TypeVar("_T", int, float)
_DESCRIPTION = "description"


@dataclass(frozen=True, kw_only=True)
class Description:
    """What is to be known of a constant.

    Attributes:
        name: Its name, with that of its group: "grow.votes".
        value: The value that it has.
        unit: What it counts; "share" is from 0 to 1, "ratio" is one quantity over another.
        low, high: The range within which it may sensibly lie.
        meaning: What it says, in a sentence.
        why: Why it has this value, and no smaller or larger one.
        off: The value with which it has no effect; None if there is none.
    """

    name: str
    value: float
    unit: str
    low: float
    high: float
    meaning: str
    why: str
    off: float | None


class Constants:
    """A group of constants that belong to one part of the controller; a frozen dataclass of `constant` fields."""

    @classmethod
    def group(cls) -> str:
        """The name of the group, such as "in_process" of `InProcessConstants`."""
        name = cls.__name__.removesuffix("Constants")
        return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")

    def described(self) -> Iterator[Description]:
        """All of them, in their order."""
        for each in fields(self):  # type: ignore[arg-type]  # the groups are dataclasses, this class is not
            value = getattr(self, each.name)
            yield Description(name=f"{self.group()}.{each.name}", value=value, **each.metadata[_DESCRIPTION])


def constant(value: _T, unit: str, low: float, high: float, meaning: str, why: str, *, off: float | None = None) -> _T:
    """A field of a group; see `Description`."""
    description = {"unit": unit, "low": low, "high": high, "meaning": meaning, "why": why, "off": off}
    found: Any = field(default=value, metadata={_DESCRIPTION: description})
    return found  # type: ignore[no-any-return]
