"""How far ahead an epoch runs, and how many tickets travel in a message. Pure; knows no pool.

How far it runs ahead (the *prefetch*) is PyTorch's ``num_workers * prefetch_factor`` unless something better is known:

* Tiny batches (under `TINY_S`) are worth grouping, many tickets to a message, which takes a wider prefetch. That draws
  further ahead from the sampler, so it is done only for samplers that cannot tell (see `draws_ahead_safely`).
* The way to a remote worker and back is long: with such samplers each has `REMOTE_PREFETCH` batches in flight, as far
  as `REMOTE_BYTES` allow.
* When made batches wait behind a straggler while workers idle, the prefetch widens: under ``seeding="batch"``, and
  under ``"worker"`` for such samplers.
* An explicit ``prefetch_factor`` or ``resize(prefetch=…)`` is kept to the letter.
* ``memory_budget`` limits what is drawn by the bytes that wait for their delivery and, for what is not made yet, by the
  largest batch so far. As the next may be larger than all before, no worker has more than a few tickets then
  (`BUDGETED_LOCAL`, `BUDGETED_REMOTE`), one to a message: they are all that can exceed the budget.
* A tuner that says the prefetch says it instead of these rules: only grouping widens it, and what is explicit
  limits it.
"""

from __future__ import annotations

from dataclasses import dataclass

TINY_S = 0.0003
"""A batch that takes less costs more to hand over than to make."""
MESSAGE_S = 0.001
"""Of making: so many tiny batches make one message."""
REMOTE_MESSAGE_S = 0.01
"""The same for a remote worker, whose messages also travel."""
LARGEST_GROUP = 128
"""Tickets in a message, at most."""
GROUPED_BYTES = 16 << 20
"""Grouping does not put more than that in flight."""
REMOTE_PREFETCH = 4
"""Batches in flight for each remote worker: one being made, the others on their way."""
REMOTE_WINDOW = 2
"""Messages of tickets for each remote worker that a node holds, at most: the one that the worker makes, and one that
waits there or whose batches are on the network. A round trip in a data centre is much shorter than making a message, so
no worker waits for the next one. More would only queue on the network, and hold up what others made, as batches are
delivered in order."""
REMOTE_BYTES = 1 << 30
"""Not more in flight than that for their sake."""
BUDGETED_LOCAL = 2
BUDGETED_REMOTE = 4
"""Tickets that a worker may hold under a ``memory_budget``: the one that it makes, and what keeps it busy meanwhile."""
STRAGGLER_FACTOR = 8
"""Behind a straggler the prefetch widens to so many times PyTorch's own, at most."""
STRAGGLER_BYTES = 512 << 20
"""And no further while so much is made and waits."""
STRAGGLER_FREE_BYTES = 64 << 20
"""Where more than that would be in flight, the prefetch widens to `STRAGGLER_LARGE` times PyTorch's own, at most."""
STRAGGLER_LARGE = 2
"""Large batches take at most twice the memory that PyTorch's take."""
_LEAST_SEEN = 8
"""Results that must be known before anything is concluded from them."""


@dataclass(kw_only=True)
class Sizes:
    """What is wanted: workers by pool, and the prefetch; ``prefetch=None`` leaves the prefetch to dpex.

    ``tuned_prefetch``: what a tuner asks for, within ``prefetch``; None: nobody tunes.
    """

    local: int
    remote: int
    prefetch: int | None
    tuned_prefetch: int | None = None


class PrefetchRules:
    """What was learnt of the work so far (averages that forget slowly), and what follows from it.

    Args:
        base_prefetch: PyTorch's own prefetch, in batches.
        logical: tickets belong to logical workers (``seeding="worker"``, streams).
        may_read_ahead: nobody can tell if the sampler is drawn further ahead.
        memory_budget: bytes in flight at most; ``is_capped``: whether that is less than would else be in flight.
    """

    def __init__(self, *, base_prefetch: int, logical: bool, may_read_ahead: bool, memory_budget: int | None) -> None:
        self.service_s = 0.0
        self.nbytes = 0.0
        self.group = 1
        self.may_read_ahead = may_read_ahead
        self.is_capped = False
        self.is_budgeted = memory_budget is not None
        """Whether `within_budget` must be asked before tickets are drawn."""
        self.carried_bytes = 0
        """The most that a ticket carried which was drawn together with its samples; part of what it takes."""
        self._base_prefetch = base_prefetch
        self._logical = logical
        self._memory_budget = memory_budget
        self._largest = 0
        self._seen = 0
        self._straggler_prefetch = 0

    def learn(self, service_s: float, nbytes: int) -> None:
        """Take in one result."""
        self._seen += 1
        weight = max(0.02, 1.0 / self._seen)
        self.service_s += weight * (service_s - self.service_s)
        self.nbytes += weight * (nbytes - self.nbytes)
        self._largest = max(self._largest, nbytes)

    def regroup(self, sizes: Sizes, workers: int) -> None:
        """Set the group, for that many running workers, by what is known by now."""
        if self._seen < _LEAST_SEEN or self._memory_budget is not None:
            return
        if self.service_s < TINY_S and self.may_read_ahead and sizes.prefetch is None:
            most = max(1, int(GROUPED_BYTES // max(1.0, self.nbytes) // (4 * workers)))
            self.group = max(1, min(LARGEST_GROUP, int(MESSAGE_S / max(self.service_s, 1e-6)), most))
        else:
            self.group = 1

    def prefetch(self, sizes: Sizes) -> int:
        """Batches drawn and not yet delivered, at most."""
        workers = max(1, sizes.local + sizes.remote)
        if sizes.tuned_prefetch is not None:
            prefetch = max(sizes.tuned_prefetch, workers if self._logical else 1)
            if self.may_read_ahead and self.group > 1:
                prefetch = max(prefetch, 4 * self.group * workers)
            prefetch = min(prefetch, prefetch if sizes.prefetch is None else sizes.prefetch)
        elif sizes.prefetch is not None:
            prefetch = sizes.prefetch
        else:
            prefetch = max(self._base_prefetch, self._straggler_prefetch, 1 if self._logical else 2 * workers)
            if self.may_read_ahead and self.group > 1:
                prefetch = max(prefetch, 4 * self.group * workers)
            if self.may_read_ahead and sizes.remote:
                affordable = int(REMOTE_BYTES // max(1.0, self.nbytes))
                prefetch = max(prefetch, min(affordable, REMOTE_PREFETCH * sizes.remote + 2 * sizes.local))
        if self._memory_budget is not None:
            affordable = self._memory_budget // self._each_bytes if self._largest else 1
            self.is_capped = affordable < prefetch
            prefetch = min(prefetch, affordable)
        return max(1, prefetch)

    @property
    def _each_bytes(self) -> int:
        """What a ticket may take until its batch is delivered."""
        return self._largest + self.carried_bytes

    def within_budget(self, room: int, sizes: Sizes, in_flight: int, ready_bytes: int) -> int:
        """How many of ``room`` tickets may be drawn while so many are not made yet, and so many bytes not delivered.

        At least one, where there is nothing of either.
        """
        assert self._memory_budget is not None
        most = max(1, BUDGETED_LOCAL * sizes.local + BUDGETED_REMOTE * sizes.remote)
        if self._largest:
            most = min(most, (self._memory_budget - ready_bytes) // self._each_bytes)
        if not in_flight and not ready_bytes:
            most = max(1, most)
        return max(0, min(room, most - in_flight))

    def message_size(self, prefetch: int, workers: int, remote: bool) -> int:
        """Tickets per message: enough to be worth a message, few enough that no worker is left without."""
        group = self.group
        if remote and self._memory_budget is None and self._seen and self.service_s < 2 * REMOTE_MESSAGE_S:
            group = min(LARGEST_GROUP, max(group, int(REMOTE_MESSAGE_S / max(1e-5, self.service_s))))
        return max(1, min(group, prefetch // (2 * max(1, workers))))

    def widen(self, prefetch: int, ready: int) -> bool:
        """Finished batches wait behind a slow one: look further ahead, if memory allows. Returns True if it does."""
        affordable = max(STRAGGLER_LARGE * self._base_prefetch, int(STRAGGLER_FREE_BYTES // max(1.0, self.nbytes)))
        most = min(STRAGGLER_FACTOR * self._base_prefetch, affordable)
        if prefetch >= most or ready * self.nbytes > STRAGGLER_BYTES:
            return False
        self._straggler_prefetch = min(most, prefetch + max(1, prefetch // 4))
        return True
