"""What the engine's state asks for: values that somebody else performs. PURE.

There is one instruction for each message to a worker, never one for each batch: batches that are ready wait in the
schedule, from which the consumer takes them directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dpex.core.first_stream import ALL
from dpex.core.schedule import Ticket


class Send(NamedTuple):
    """Send these tickets, all of one queue, in one message to that pool: to ``worker``, or to any (None).

    ``again``: they were made before, by a worker that died with the random state they left behind.
    """

    pool: str
    worker: int | None
    queue: int
    epoch: int
    tickets: list[Ticket]
    again: bool = False


class Adopt(NamedTuple):
    """Let ``worker`` be logical worker ``logical``, with this random state (None: as at its start).

    ``streams``: how many streams the dataset is read in, as in `dpex.core.first_stream`.
    """

    pool: str
    worker: int
    logical: int
    state: Any
    streams: int = ALL


class AskState(NamedTuple):
    """Have ``worker`` ask the dataset of ``logical`` for its state from now on, once at once and then now and then."""

    pool: str
    worker: int
    logical: int


class Scale(NamedTuple):
    """Ask the pool for that many workers; it is made when there is none of that name.

    ``optional``: if they cannot be had that is an event (`ScaleRefused`), not an error.
    """

    pool: str
    wanted: int
    optional: bool = False


class EnterEpoch(NamedTuple):
    """Tell every pool that results of earlier epochs are discarded from now on."""

    epoch: int


class Discard(NamedTuple):
    """Decode results that nobody wants and drop them: that gives their memory back."""

    values: tuple[Callable[[], Any], ...]


class Say(NamedTuple):
    """Tell a person: as a warning, or in the log. ``once``: what it is about, if that is told once in a process."""

    text: str
    warning: bool = True
    once: str = ""


class Raise(NamedTuple):
    """End the epoch with this error at the consumer's next turn."""

    error: Exception


ToWorker = Adopt | AskState
"""Instructions to one worker, void once it has ended."""
Instruction = Send | ToWorker | Scale | EnterEpoch | Discard | Say | Raise
