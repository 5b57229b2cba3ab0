"""How far ahead an epoch runs, and how many tickets travel in a message. Pure; knows no lane.

How far it runs ahead (the *window*) is PyTorch's ``num_workers * prefetch_factor`` unless something better is known:

* Tiny batches (under `TINY_S`) are worth grouping, many tickets to a message, which takes a wider window. That draws
  further ahead from the sampler, so it is done only for samplers that cannot tell (see `iterators.draws_ahead_safely`).
* The way to a remote worker and back is long: with such samplers each has `REMOTE_DEPTH` batches in flight, as far as
  `REMOTE_BYTES` allow.
* When made batches wait behind a straggler while workers idle, the window widens: under ``seeding="batch"``, and under
  ``"worker"`` for such samplers.
* An explicit ``prefetch_factor`` or ``resize(prefetch=…)`` is kept to the letter.
* ``memory_budget`` limits what is drawn by the bytes that wait for their delivery and, for what is not made yet, by the
  largest batch so far. As the next may be larger than all before, no worker has more than a few tickets then
  (`BUDGETED_LOCAL`, `BUDGETED_REMOTE`), one to a message: they are all that can exceed the budget.
* A tuner that says the depth says it instead of these rules: only grouping widens it, and what is explicit limits it.
"""

from __future__ import annotations

from dataclasses import dataclass

TINY_S = 0.0003
MESSAGE_S = 0.001
REMOTE_MESSAGE_S = 0.01
LARGEST_GROUP = 128
STRETCH_BYTES = 16 << 20
REMOTE_DEPTH = 4
REMOTE_BYTES = 1 << 30
BUDGETED_LOCAL = 2
BUDGETED_REMOTE = 4
"""Tickets that a worker may hold under a ``memory_budget``: the one that it makes, and what keeps it busy meanwhile."""
STRAGGLER_FACTOR = 8
STRAGGLER_BYTES = 512 << 20
_LEAST_SEEN = 8
"""Results that must be known before anything is concluded from them."""


@dataclass(kw_only=True)
class Sizes:
    """What is wanted: hosts by lane, and the window; ``prefetch=None`` leaves the window to dpex.

    ``depth``: the window that a tuner asks for, within ``prefetch``; None: nobody tunes.
    """

    local: int
    remote: int
    prefetch: int | None
    depth: int | None = None


class Pace:
    """What was learnt of the work so far (averages that forget slowly), and what follows from it.

    Args:
        base_window: PyTorch's look-ahead, in batches.
        logical: tickets belong to logical workers (``seeding="worker"``, streams).
        stretch: nobody can tell if the sampler is drawn further ahead.
        memory_budget: bytes in flight at most; ``is_capped``: whether that is less than would else be in flight.
    """

    def __init__(self, *, base_window: int, logical: bool, stretch: bool, memory_budget: int | None) -> None:
        self.service_s = 0.0
        self.nbytes = 0.0
        self.group = 1
        self.stretch = stretch
        self.is_capped = False
        self._base_window = base_window
        self._logical = logical
        self._memory_budget = memory_budget
        self._largest = 0
        self._seen = 0
        self._here_seen = 0
        self._straggler_window = 0

    def learn(self, service_s: float, nbytes: int) -> None:
        """Take in one result."""
        self._seen += 1
        weight = max(0.02, 1.0 / self._seen)
        self.service_s += weight * (service_s - self.service_s)
        self.nbytes += weight * (nbytes - self.nbytes)
        self._largest = max(self._largest, nbytes)

    def learn_here(self, service_s: float) -> None:
        """Take in a batch that was made in this process: how large it is was not seen."""
        self._here_seen += 1
        if not self._seen:
            self.service_s += max(0.02, 1.0 / self._here_seen) * (service_s - self.service_s)

    def regroup(self, sizes: Sizes, hosts: int) -> None:
        """Set the group, for that many running hosts, by what is known by now."""
        if self._seen < _LEAST_SEEN or self._memory_budget is not None:
            return
        if self.service_s < TINY_S and self.stretch and sizes.prefetch is None:
            most = max(1, int(STRETCH_BYTES // max(1.0, self.nbytes) // (4 * hosts)))
            self.group = max(1, min(LARGEST_GROUP, int(MESSAGE_S / max(self.service_s, 1e-6)), most))
        else:
            self.group = 1

    def window(self, sizes: Sizes) -> int:
        """Batches drawn and not yet delivered, at most."""
        hosts = max(1, sizes.local + sizes.remote)
        if sizes.depth is not None:
            window = max(sizes.depth, hosts if self._logical else 1)
            if self.stretch and self.group > 1:
                window = max(window, 4 * self.group * hosts)
            window = min(window, window if sizes.prefetch is None else sizes.prefetch)
        elif sizes.prefetch is not None:
            window = sizes.prefetch
        else:
            window = max(self._base_window, self._straggler_window, 1 if self._logical else 2 * hosts)
            if self.stretch and self.group > 1:
                window = max(window, 4 * self.group * hosts)
            if self.stretch and sizes.remote:
                affordable = int(REMOTE_BYTES // max(1.0, self.nbytes))
                window = max(window, min(affordable, REMOTE_DEPTH * sizes.remote + 2 * sizes.local))
        if self._memory_budget is not None:
            affordable = self._memory_budget // self._largest if self._largest else 1
            self.is_capped = affordable < window
            window = min(window, affordable)
        return max(1, window)

    @property
    def is_budgeted(self) -> bool:
        """Whether `within_budget` must be asked before tickets are drawn."""
        return self._memory_budget is not None

    def within_budget(self, room: int, sizes: Sizes, in_flight: int, ready_bytes: int) -> int:
        """How many of ``room`` tickets may be drawn while so many are not made yet, and so many bytes not delivered.

        At least one, where there is nothing of either.
        """
        assert self._memory_budget is not None
        most = max(1, BUDGETED_LOCAL * sizes.local + BUDGETED_REMOTE * sizes.remote)
        if self._largest:
            most = min(most, (self._memory_budget - ready_bytes) // self._largest)
        if not in_flight and not ready_bytes:
            most = max(1, most)
        return max(0, min(room, most - in_flight))

    def message_size(self, window: int, hosts: int, remote: bool) -> int:
        """Tickets per message: enough to be worth a message, few enough that no worker is left without."""
        group = self.group
        if remote and self._memory_budget is None and self._seen and self.service_s < 2 * REMOTE_MESSAGE_S:
            group = min(LARGEST_GROUP, max(group, int(REMOTE_MESSAGE_S / max(1e-5, self.service_s))))
        return max(1, min(group, window // (2 * max(1, hosts))))

    def widen(self, window: int, ready: int) -> bool:
        """Finished batches wait behind a slow one: look further ahead, if memory allows."""
        if ready * self.nbytes > STRAGGLER_BYTES:
            return False
        self._straggler_window = min(STRAGGLER_FACTOR * self._base_window, window + max(1, window // 4))
        return True
