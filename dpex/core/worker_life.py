"""The life of a worker as its pool sees it: stages, and the steps between them, as a table. PURE.

    asked → up → leaving → gone

Who is dismissed before it was up leaves all the same, once it has done what it was sent. `LIFE` holds every step that
there is; another one is an error in dpex, and leaves the worker as it was:

    worker.stage = LIFE[worker.stage, SERVES]

That is an assignment without a call, so no exception of a signal handler can come out in the middle of it. A step that
is taken twice, as the message that told of it was read twice, changes nothing the second time.
"""

from __future__ import annotations

from typing import Final, Literal

from dpex.errors import InternalError

Stage = Literal["asked", "up", "dismissed", "leaving", "gone"]
Step = Literal["serves", "is asked to leave", "ends"]

ASKED: Final = "asked"
"""The system was asked for it."""
UP: Final = "up"
"""It makes batches."""
DISMISSED: Final = "dismissed"
"""It was asked to leave before it was up."""
LEAVING: Final = "leaving"
"""It was asked to leave, and finishes what it holds."""
GONE: Final = "gone"
"""It has ended."""

SERVES: Final = "serves"
IS_ASKED_TO_LEAVE: Final = "is asked to leave"
ENDS: Final = "ends"

RUNNING = frozenset({UP, LEAVING})
"""Stages in which a worker counts as running."""
STAYING = frozenset({ASKED, UP})
"""Stages of workers that nobody asked to leave."""


class LifeError(InternalError):
    """A step that a worker cannot take at its stage."""


class _Table(dict[tuple[Stage, Step], Stage]):
    def __missing__(self, key: tuple[Stage, Step]) -> Stage:
        stage, step = key
        raise LifeError(f"a worker that is {stage!r} cannot take the step {step!r}")


LIFE = _Table(
    {
        (ASKED, SERVES): UP,
        (ASKED, IS_ASKED_TO_LEAVE): DISMISSED,
        (ASKED, ENDS): GONE,
        (UP, SERVES): UP,
        (UP, IS_ASKED_TO_LEAVE): LEAVING,
        (UP, ENDS): GONE,
        (DISMISSED, SERVES): LEAVING,
        (DISMISSED, IS_ASKED_TO_LEAVE): DISMISSED,
        (DISMISSED, ENDS): GONE,
        (LEAVING, SERVES): LEAVING,
        (LEAVING, IS_ASKED_TO_LEAVE): LEAVING,
        (LEAVING, ENDS): GONE,
    }
)
"""The stage after each step, by the stage before it."""
