"""``seeding="batch"`` at work: every ticket is made from random states that are a function of its seed alone.

Setting three generators costs 6 to 9 µs, as much as a tiny batch takes to make, and a dataset of tiny batches seldom
draws. So:

* Every ticket is seeded, until `TRIAL` in a row took under `QUIET_S` each and none so far has moved a generator.
* From then on tickets are made *unseeded*, and the generators are looked at afterwards. If one has moved, what was made
  is thrown away, the ticket is seeded and made again, and every later one is seeded at once. So a dataset whose first
  draw comes after that makes one batch twice in that process, and never a second one.
* ``torch.initial_seed()`` is the ticket's in either case. What reads more of a generator than that *and leaves it as it
  was* cannot be noticed: only for such code, in a dataset that does not draw, do states depend on more than the seed.

With ``keep`` (in the training process) the generators are left as they were found, whatever the dataset does to them.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch

from dpex.globalrandom import ByFunctions, Generators, InMemory, located
from dpex.seeding import epoch_key, ticket_seed

TRIAL = 32
QUIET_S = 0.0003
Made = TypeVar("Made")


def seed_ticket(seed: int) -> None:
    """Set the three global generators for one ticket; ``torch.manual_seed`` would cost a hundred times more."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


class TicketSeeding:
    """See the module; ``keep``: leave the generators as they were."""

    def __init__(self, base_seed: int, *, keep: bool) -> None:
        self.quiet = False
        """Tickets are made unseeded at present."""
        self._base_seed = base_seed
        self._keep = keep
        self._epoch, self._key = -1, 0
        self._memory: InMemory | None = located()
        self._tried = 0
        self._saved: Any = None
        self._saved_at: tuple[Any, ...] = ()

    def make(self, fetch: Callable[[Any], Made], index: Any, number: int, epoch: int) -> Made:
        """``fetch(index)`` as it is after ticket ``number`` was seeded; its errors come as they are."""
        if epoch != self._epoch:
            self._epoch, self._key = epoch, epoch_key(self._base_seed, epoch)
        seed = ticket_seed(self._key, number)
        if self.quiet:
            made = self._unseeded(fetch, index, seed)
            if made is not None:
                return made
        return self._seeded_and_kept(fetch, index, seed) if self._keep else self._seeded(fetch, index, seed)

    def _unseeded(self, fetch: Callable[[Any], Made], index: Any, seed: int) -> Made | None:
        """What ``fetch`` makes with whatever states there are; None if it drew from them."""
        memory = self._memory
        if memory is None or not memory.holds():
            self._stay_loud()
            return None
        before, torch_seed = memory.look(), memory.torch_seed
        if self._keep and before != self._saved_at:
            self._saved, self._saved_at = memory.save(), before
        own, torch_seed.value = torch_seed.value, seed
        try:
            made = fetch(index)
        except BaseException as error:
            torch_seed.value = own
            if self._moved_since(before, memory) and isinstance(error, Exception):
                return None
            raise
        torch_seed.value = own
        return None if self._moved_since(before, memory) else made

    def _moved_since(self, before: tuple[Any, ...], memory: InMemory) -> bool:
        """Whether somebody drew; if so, that is undone, and tickets are seeded from now on."""
        if memory.look() == before and memory.holds():
            return False
        self._stay_loud()
        if self._keep:
            memory.restore(self._saved)
        return True

    def _stay_loud(self) -> None:
        self.quiet, self._memory = False, None

    def _seeded_and_kept(self, fetch: Callable[[Any], Made], index: Any, seed: int) -> Made:
        generators: Generators = located() or ByFunctions()
        state = generators.save()
        try:
            return self._seeded(fetch, index, seed)
        finally:
            generators.restore(state)

    def _seeded(self, fetch: Callable[[Any], Made], index: Any, seed: int) -> Made:
        seed_ticket(seed)
        memory = self._memory
        if memory is None:
            return fetch(index)
        before, began = memory.look(), time.perf_counter()
        made = fetch(index)
        self._tried = self._tried + 1 if time.perf_counter() - began < QUIET_S else 0
        if memory.look() != before or not memory.holds():
            self._stay_loud()
        elif self._tried == TRIAL:
            self.quiet = True
        return made
