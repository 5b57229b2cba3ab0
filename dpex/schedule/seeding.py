"""The random seed of a worker or a ticket, in numbers that never change. PURE: integers in, integers out.

Two schemes exist. Under ``"worker"`` the seeds are PyTorch's: worker *w* gets ``base_seed + w`` and its state runs on
from batch to batch. Under ``"batch"`` the state before batch *i* is a function of (base seed, epoch, *i*) alone, so it
does not matter where, or how often, the batch is made.

The mixing function is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

from typing import NamedTuple

_MASK64 = 0xFFFFFFFFFFFFFFFF
"""Seeds are integers of 64 bits."""
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64: 2^64 over the golden ratio, made odd (Steele, Lea and Flood, 2014)."""
MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SEEDINGS = ("worker", "batch")


def mix64(value: int) -> int:
    """Finaliser of SplitMix64: a bijection of 64-bit integers in which every input bit reaches every output bit."""
    value = ((value ^ (value >> 30)) * MIX[0]) & _MASK64
    value = ((value ^ (value >> 27)) * MIX[1]) & _MASK64
    return value ^ (value >> 31)


def epoch_key(base_seed: int, epoch: int) -> int:
    """64-bit key of one pass over the data; ``base_seed`` is the signed 64-bit integer drawn at ``iter()``."""
    return mix64((mix64(base_seed & _MASK64) + (epoch + 1) * GOLDEN_GAMMA) & _MASK64)


def ticket_seed(key: int, number: int) -> int:
    """63-bit seed of batch ``number`` under ``key`` (see `epoch_key`); non-negative, as every generator wants it."""
    return mix64((key + (number + 1) * GOLDEN_GAMMA) & _MASK64) >> 1


class EpochIds(NamedTuple):
    """Numbers by which workers know epochs: `epoch_key` with the base seed of the workers gives the right seeds.

    Keys depend on the lower 64 bits alone. ``shift``, in these bits, stands for another base seed. ``serial``, above
    them, tells an epoch from one that was begun ahead under the same number and dropped; ids grow with it. Ids are the
    epochs themselves as long as both are 0.
    """

    serial: int = 0
    shift: int = 0

    def of(self, epoch: int) -> int:
        """Return the id of an epoch."""
        if not self.serial and not self.shift:
            return epoch
        return (self.serial << 64) + ((epoch + self.shift) & _MASK64)

    def after_drop(self) -> EpochIds:
        """Return the ids of the epochs after one that was dropped."""
        return self._replace(serial=self.serial + 1)

    def with_base_seed(self, known: int, other: int) -> EpochIds:
        """Return the ids of the epochs of base seed ``other``, if these are the ids of base seed ``known``."""
        difference = mix64(other & _MASK64) - mix64(known & _MASK64)
        shift = (self.shift + difference * pow(GOLDEN_GAMMA, -1, 1 << 64)) & _MASK64
        return EpochIds(serial=self.serial + 1, shift=shift)
