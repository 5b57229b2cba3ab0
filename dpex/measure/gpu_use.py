"""NVML's readings while a loader was tuned: how long the GPU ran kernels, and reasons that held its clocks back. PURE.

A training that has ended leaves an idle GPU, so windows are added up only while passes run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from dpex.measure.record import Record, by_name, counter


@dataclass(frozen=True, kw_only=True)
class GpuUse(Record):
    """Sums over the windows for which NVML had readings."""

    seconds: float = counter("Seconds of these windows.", "seconds")
    busy_s: float = counter("Seconds in which a kernel ran.", "seconds")
    supplied_s: float = counter("Seconds of the windows at whose end batches were ready.", "seconds")
    supplied_busy_s: float = counter("Seconds of those in which a kernel ran.", "seconds")
    held_back_s: Mapping[str, float] = by_name(
        "Seconds of the windows at whose end the GPU's clocks were held back, by reason.", "seconds"
    )

    @classmethod
    def of_window(cls, seconds: float, busy: float, *, is_supplied: bool, held_back: tuple[str, ...]) -> GpuUse:
        """Return the sums of one window, in which the GPU ran kernels for the share ``busy`` of the time."""
        supplied_s = seconds if is_supplied else 0.0
        return cls(
            seconds=seconds,
            busy_s=busy * seconds,
            supplied_s=supplied_s,
            supplied_busy_s=busy * supplied_s,
            held_back_s=dict.fromkeys(held_back, seconds),
        )

    @property
    def busy_ratio(self) -> float | None:
        """Share of the time in which some kernel ran, 0 to 1; None if there is no window."""
        return self.busy_s / self.seconds if self.seconds > 0 else None

    @property
    def supplied_busy_ratio(self) -> float | None:
        """Share of the time with batches ready in which a kernel ran; None without such a time."""
        return self.supplied_busy_s / self.supplied_s if self.supplied_s > 0 else None

    @property
    def supplied_idle_ratio(self) -> float:
        """Share of all the time in which batches were ready and no kernel ran, 0 to 1."""
        return (self.supplied_s - self.supplied_busy_s) / self.seconds if self.seconds > 0 else 0.0

    def held_back(self) -> list[tuple[str, float]]:
        """The reasons with their shares of the time, the largest first."""
        shares = ((name, held_s / self.seconds) for name, held_s in self.held_back_s.items())
        return sorted(shares, key=lambda pair: -pair[1])
