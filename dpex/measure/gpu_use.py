"""What NVML said of the GPU while a loader was tuned: for how long it ran kernels, and what held its clocks back. PURE.

A training that has ended leaves an idle GPU behind, so this is summed while passes run, window by window.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class GpuUse:
    """Sums over windows in which NVML answered.

    Attributes:
        seconds: The time of these windows.
        busy_s: In which some kernel ran.
        supplied_s: The time of those windows at whose end batches were ready.
        supplied_busy_s: In which, of that, some kernel ran.
        held_back_s: The time of those windows at whose end the GPU's clocks were held back, by the reason.
    """

    seconds: float = 0.0
    busy_s: float = 0.0
    supplied_s: float = 0.0
    supplied_busy_s: float = 0.0
    held_back_s: Mapping[str, float] = field(default_factory=dict)

    def with_window(self, seconds: float, busy: float, *, is_supplied: bool, held_back: tuple[str, ...]) -> GpuUse:
        """Return the sums with another window, in which the GPU ran kernels for the share ``busy`` of the time."""
        reasons = {name: self.held_back_s.get(name, 0.0) + seconds for name in held_back}
        supplied_s = seconds if is_supplied else 0.0
        return GpuUse(
            seconds=self.seconds + seconds,
            busy_s=self.busy_s + busy * seconds,
            supplied_s=self.supplied_s + supplied_s,
            supplied_busy_s=self.supplied_busy_s + busy * supplied_s,
            held_back_s={**self.held_back_s, **reasons},
        )

    @property
    def busy_ratio(self) -> float | None:
        """Share of the time in which some kernel ran, 0 to 1; None if there is no window."""
        return self.busy_s / self.seconds if self.seconds > 0 else None

    @property
    def supplied_busy_ratio(self) -> float | None:
        """The same of the time in which batches were ready; None if there is none."""
        return self.supplied_busy_s / self.supplied_s if self.supplied_s > 0 else None

    @property
    def supplied_idle_ratio(self) -> float:
        """Share of all the time in which batches were ready and no kernel ran, 0 to 1."""
        return (self.supplied_s - self.supplied_busy_s) / self.seconds if self.seconds > 0 else 0.0

    def held_back(self) -> list[tuple[str, float]]:
        """The reasons with their shares of the time, the largest first."""
        shares = ((name, held_s / self.seconds) for name, held_s in self.held_back_s.items())
        return sorted(shares, key=lambda pair: -pair[1])
