"""The prefetch of an epoch, and the number of tickets in a message. PURE; knows no pool.

The prefetch is the maximum number of batches that are drawn and not yet delivered. It is PyTorch's ``num_workers *
prefetch_factor``, because a dataset may read data that the training changes, such as a replay buffer in shared memory.
A batch from such a buffer is as many steps old as the prefetch. A wider prefetch for groups of tiny batches was tried:
it made twice as many batches, but batches from a replay buffer were up to 149 steps old. Exceptions from this rule are:

* An explicit ``prefetch_factor`` or ``resize(prefetch=…)`` is exact.
* Remote workers have a long round trip, and share no memory with the training. Each has `REMOTE_PREFETCH` batches in
  flight, within `REMOTE_BYTES`, if drawing the sampler ahead cannot be observed (see `draws_ahead_safely`).
* ``memory_budget`` limits the drawn tickets. A finished batch counts with its bytes, and an unfinished ticket with the
  bytes of the largest batch so far. A later batch may be larger and exceed the budget. Therefore each worker then has
  only a few tickets (`BUDGETED_LOCAL`, `BUDGETED_REMOTE`), one per message.
* A worker of an asynchronous dataset makes several batches at a time. The prefetch is multiplied by their number.
* A tuner's prefetch replaces these rules. An explicit prefetch limits it.

Tiny batches (under `TINY_S`) are grouped, many tickets to a message. Where a tuner runs, or all workers are remote, the
prefetch widens to make room for groups of `MESSAGE_S`. Otherwise groups are as large as the prefetch allows.
"""

from __future__ import annotations

from dpex.measure.settings import Settings

TINY_S = 0.0003
"""A batch that takes fewer seconds costs more to hand over than to make."""
MESSAGE_S = 0.001
"""Seconds of work that the tickets of one message should contain."""
REMOTE_MESSAGE_S = 0.01
"""Seconds of work that one message to a remote worker should contain. Handing over this message takes longer."""
LARGEST_GROUP = 128
"""Maximum tickets in a message."""
GROUPED_BYTES = 16 << 20
"""Maximum bytes in flight up to which the prefetch widens for groups."""
REMOTE_PREFETCH = 4
"""Batches in flight for each remote worker: one is being made, and the rest are on the network."""
REMOTE_WINDOW = 2
"""Maximum number of messages of tickets that a node holds for each remote worker. The worker makes the batches of one
message. Another message waits on the node, or its batches are on the network. A round trip in a data centre is much
shorter than making these batches, so no worker waits for a message. More messages would only queue on the network and
delay the batches of other workers, because batches are delivered in order."""
REMOTE_BYTES = 1 << 30
"""Maximum bytes in flight up to which the prefetch widens for remote workers."""
BUDGETED_LOCAL = 2
BUDGETED_REMOTE = 4
"""Tickets that a worker may hold under a ``memory_budget``: the ticket that it makes, and further tickets that keep it
busy afterwards. A worker that makes n batches at the same time may hold n - 1 more."""
_REMEMBERED = 50
"""Approximate number of latest results that count in the averages."""
_LEAST_SEEN = 8
"""Minimum results before the averages decide anything. Message size and prefetch are computed again after as many."""


class PrefetchRules:
    """Moving averages of the time and bytes of batches, and the rules that depend on them.

    Args:
        logical: True if tickets belong to logical workers.
        may_group: True if the sampler may be drawn in groups.
        memory_budget: The maximum bytes in flight, or None.
        lanes: Batches that a worker makes at the same time. It multiplies a prefetch that is neither fixed nor tuned.
        is_tuned: True if a tuner chooses the settings.

    Attributes:
        is_capped: True if the memory budget reduces the prefetch.
    """

    def __init__(
        self,
        *,
        logical: bool,
        may_group: bool,
        memory_budget: int | None,
        lanes: int = 1,
        is_tuned: bool = False,
    ) -> None:
        self.service_s: float = 0.0
        self.nbytes: float = 0.0
        self.group: int = 1
        self.is_capped: bool = False
        self.is_budgeted: bool = memory_budget is not None
        """True if `within_budget` must be asked before tickets are drawn."""
        self.carried_bytes = 0
        """Bytes of the samples in the largest ticket so far, if tickets contain the samples of a stream, else 0."""
        self.is_tuned: bool = is_tuned
        self._lanes = lanes
        self._logical = logical
        self._may_group = may_group
        self._memory_budget = memory_budget
        self._largest = 0
        self._seen = 0
        self.is_due: bool = False
        """True if the message size and the prefetch are to be computed again."""

    def add_batch(self, service_s: float, nbytes: int) -> None:
        self._seen += 1
        weight = 1.0 / self._seen if self._seen < _REMEMBERED else 1.0 / _REMEMBERED
        self.service_s += weight * (service_s - self.service_s)
        self.nbytes += weight * (nbytes - self.nbytes)
        if nbytes > self._largest:
            self._largest = nbytes
            self.is_due = True
        if self._seen % _LEAST_SEEN == 0:
            self.is_due = True

    def regroup(self, settings: Settings, workers: int) -> None:
        """Set the number of tickets in a message, for ``workers`` running workers."""
        self.is_due = False
        self.group = 1
        if self._seen < _LEAST_SEEN or self._memory_budget is not None:
            return
        if self.service_s < TINY_S and self._may_group:
            if self._may_widen(settings):
                most = int(GROUPED_BYTES // max(1.0, self.nbytes) // (4 * workers))
            else:
                most = self.prefetch(settings) // (2 * workers)
            self.group = max(1, min(LARGEST_GROUP, int(MESSAGE_S / max(self.service_s, 1e-6)), most))

    def _may_widen(self, settings: Settings) -> bool:
        """Return True if the prefetch may widen for the sake of groups."""
        is_all_remote = settings.remote > 0 and not settings.local
        return self._may_group and not settings.is_prefetch_fixed and (self.is_tuned or is_all_remote)

    def prefetch(self, settings: Settings) -> int:
        """Return the maximum number of batches that are drawn and not yet delivered."""
        prefetch = settings.prefetch if settings.is_prefetch_fixed else self._widened(settings)
        if self._memory_budget is not None:
            affordable = self._memory_budget // self._each_bytes if self._largest else 1
            self.is_capped = affordable < prefetch
            prefetch = min(prefetch, affordable)
        return max(1, prefetch)

    def _widened(self, settings: Settings) -> int:
        """Return the prefetch, widened for grouped, asynchronous and remote batches, and for the number of workers."""
        workers = max(1, settings.workers)
        grouped = 4 * self.group * workers if self.group > 1 and self._may_widen(settings) else 0
        if self.is_tuned:
            return max(settings.prefetch, grouped, workers if self._logical else 1)
        prefetch = max(settings.prefetch * self._lanes, grouped, 1 if self._logical else 2 * workers)
        if self._may_group and settings.remote:
            affordable = int(REMOTE_BYTES // max(1.0, self.nbytes))
            prefetch = max(prefetch, min(affordable, REMOTE_PREFETCH * settings.remote + 2 * settings.local))
        return prefetch

    @property
    def _each_bytes(self) -> int:
        """Bytes that a ticket may take until its batch is delivered."""
        return self._largest + self.carried_bytes

    def within_budget(self, room: int, settings: Settings, in_flight: int, ready_bytes: int) -> int:
        """Return how many of ``room`` tickets may be drawn.

        The result is at least one if no ticket is in flight and no finished batch waits for its delivery.
        """
        assert self._memory_budget is not None
        beside = self._lanes - 1
        most = max(1, (BUDGETED_LOCAL + beside) * settings.local + (BUDGETED_REMOTE + beside) * settings.remote)
        if self._largest:
            most = min(most, (self._memory_budget - ready_bytes) // self._each_bytes)
        if not in_flight and not ready_bytes:
            most = max(1, most)
        return max(0, min(room, most - in_flight))

    def message_size(self, prefetch: int, workers: int, remote: bool) -> int:
        """Return the number of tickets per message: large enough to pay for the message, and small enough that every
        worker gets a message."""
        group = self.group
        if remote and self._memory_budget is None and self._seen and self.service_s < 2 * REMOTE_MESSAGE_S:
            group = min(LARGEST_GROUP, max(group, int(REMOTE_MESSAGE_S / max(1e-5, self.service_s))))
        return max(1, min(group, prefetch // (2 * max(1, workers))))
