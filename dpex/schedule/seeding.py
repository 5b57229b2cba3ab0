"""The random seed of a worker or a ticket, in numbers that never change. PURE: integers in, integers out.

Two schemes exist. Under ``"worker"`` the seeds are PyTorch's: worker *w* gets ``base_seed + w`` and its state runs on
from batch to batch. Under ``"batch"`` the state before batch *i* is a function of (base seed, epoch, *i*) alone, so it
does not matter where, or how often, the batch is made.

The mixing function is SplitMix64 (Steele, Lea and Flood, "Fast Splittable Pseudorandom Number Generators", 2014).
"""

from __future__ import annotations

_MASK64 = 0xFFFFFFFFFFFFFFFF
"""Seeds are integers of 64 bits."""
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15
"""The increment of SplitMix64: 2^64 over the golden ratio, made odd (Steele, Lea and Flood, 2014)."""
_MIX = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
SEEDINGS = ("worker", "batch")


def mix64(value: int) -> int:
    """SplitMix64's finaliser of the lower 64 bits of ``value``: a bijection. Each input bit affects each output bit."""
    value &= _MASK64
    value = ((value ^ (value >> 30)) * _MIX[0]) & _MASK64
    value = ((value ^ (value >> 27)) * _MIX[1]) & _MASK64
    return value ^ (value >> 31)


def epoch_key(base_seed: int, epoch: int) -> int:
    """64-bit key of one pass over the data; ``base_seed`` is the signed 64-bit integer drawn at ``iter()``."""
    return mix64(mix64(base_seed) + (epoch + 1) * _GOLDEN_GAMMA)


def ticket_seed(key: int, number: int) -> int:
    """63-bit seed of batch ``number`` under ``key`` (see `epoch_key`); non-negative, so every generator accepts it."""
    return mix64(key + (number + 1) * _GOLDEN_GAMMA) >> 1
