"""The user's transform of batches that are on the device, each with random numbers of its own.

The function is called in the consumer's thread, within ``next()``, as the random generators that it may draw from are
those of the training loop, on the host and on the device: no other thread could borrow them unnoticed. They begin with
a seed of the batch and go on afterwards as if nothing had been drawn. The seed is a function of the base seed, the
epoch and the number of the batch alone, and another one than the batch was made with.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from dpex.device.placing import Device
from dpex.schedule.seeding import mix64
from dpex.worker.batch_seeding import TicketSeeds, call_seeded
from dpex.worker.current_batch import current
from dpex.worker.in_process import one_at_a_time

_OTHER_WORDS = 0x6465762D74667273
"""Mixed into the base seed: a transform that draws as the dataset did must not get the same numbers again."""
_MASK64 = 0xFFFFFFFFFFFFFFFF
"""Of an unsigned integer of 64 bits."""


class SeededTransform:
    """``function`` of a batch; see the module. Used by the consumer's thread."""

    def __init__(self, function: Callable[[Any], Any], device: Device, base_seed: int) -> None:
        self._function = function
        self._device = device
        self._seeds = TicketSeeds(mix64((base_seed & _MASK64) ^ _OTHER_WORDS))

    def __call__(self, batch: Any, number: int, epoch: int) -> Any:
        """What the function returns for the batch of that number; its errors come as they are."""
        seed = self._seeds.of(number, epoch)
        with one_at_a_time(), self._device.seeded(seed):
            outer, current.seed = current.seed, seed
            try:
                return call_seeded(seed, self._function, batch)
            finally:
                current.seed = outer
