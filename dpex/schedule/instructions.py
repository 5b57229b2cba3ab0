"""Instructions of the engine's state: values that `dpex.engine.pools` carries out. PURE.

There is one instruction for each message to a worker, never one for each batch: batches that are ready wait in the
schedule, from which the consumer takes them directly.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from dpex.schedule.schedule import Ticket
from dpex.schedule.streams import ALL


class Send(NamedTuple):
    """Send tickets of one queue in one message to a pool: to ``worker``, or to any worker (None).

    ``again``: they were made before, by a worker that died with the random state that they left behind.
    """

    pool: str
    worker: int | None
    queue: int
    epoch: int
    tickets: list[Ticket]
    again: bool = False


class Adopt(NamedTuple):
    """Let ``worker`` be logical worker ``logical`` from that state on (None: as at its start).

    ``streams``: the number of streams that the dataset is read in, as in `dpex.schedule.streams`.
    """

    pool: str
    worker: int
    logical: int
    state: Any
    streams: int = ALL


class AskState(NamedTuple):
    """Have ``worker`` ask the dataset of ``logical`` for its state at once, and now and then from now on."""

    pool: str
    worker: int
    logical: int


class Scale(NamedTuple):
    """Ask a pool for ``wanted`` workers. If there is no pool of that name, it is made.

    ``optional``: if they cannot be had, that is an event (`ScaleRefused`) instead of an error.
    """

    pool: str
    wanted: int
    optional: bool = False


class EnterEpoch(NamedTuple):
    """Tell every pool that results of earlier epochs are discarded from now on."""

    epoch: int


class Discard(NamedTuple):
    """Decode results that are not wanted any more and drop them, which gives their memory back."""

    values: tuple[Callable[[], Any], ...]


class Say(NamedTuple):
    """Warn the user, or write to the log. With a key as ``once``, this appears once in a process."""

    text: str
    warning: bool = True
    once: str = ""


class Raise(NamedTuple):
    """End the epoch with this error at the consumer's next turn."""

    error: Exception


ToWorker = Adopt | AskState
"""Instructions to one worker, void once it has ended."""
Instruction = Send | ToWorker | Scale | EnterEpoch | Discard | Say | Raise
