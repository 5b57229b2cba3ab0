"""The life of a worker as its pool sees it: stages, and the steps between them, as a table. PURE.

    asked → up → leaving → gone

`LIFE` holds every step that there is. Any other step is an error in dpex, and leaves the worker unchanged:

    worker.stage = LIFE[worker.stage, SERVES]

This is an assignment without a call, so a signal handler cannot raise in the middle of it. A step that is taken twice,
as its message was read twice, changes nothing the second time.
"""

from __future__ import annotations

from typing import Final, Literal

from dpex.errors import InternalError

Stage = Literal["asked", "up", "leaving", "gone"]
Step = Literal["serves", "is asked to leave", "ends"]

ASKED: Final = "asked"
"""The system was asked for the worker."""
UP: Final = "up"
"""The worker makes batches."""
LEAVING: Final = "leaving"
"""The worker was asked to leave, and finishes what it holds."""
GONE: Final = "gone"
"""The worker has ended."""

SERVES: Final = "serves"
IS_ASKED_TO_LEAVE: Final = "is asked to leave"
ENDS: Final = "ends"

RUNNING = frozenset({UP, LEAVING})
"""Stages in which a worker counts as running."""
STAYING = frozenset({ASKED, UP})
"""Stages of workers that were not asked to leave."""


class LifeError(InternalError):
    """A step that a worker cannot take at its stage."""


class _Table(dict[tuple[Stage, Step], Stage]):
    def __missing__(self, key: tuple[Stage, Step]) -> Stage:
        stage, step = key
        raise LifeError(f"a worker that is {stage!r} cannot take the step {step!r}")


LIFE = _Table(
    {
        (ASKED, SERVES): UP,
        (ASKED, ENDS): GONE,
        (UP, SERVES): UP,
        (UP, IS_ASKED_TO_LEAVE): LEAVING,
        (UP, ENDS): GONE,
        (LEAVING, SERVES): LEAVING,
        (LEAVING, IS_ASKED_TO_LEAVE): LEAVING,
        (LEAVING, ENDS): GONE,
    }
)
"""The stage after each step, by the stage before it."""
