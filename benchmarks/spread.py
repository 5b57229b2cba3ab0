"""Median and range: how every figure of the benchmark is quoted."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Median and extremes of some values."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value. Raises statistics.StatisticsError when there is none."""
        return cls(median=median(values), low=min(values), high=max(values))
