"""Who changes the settings of a simulated loader: a controller, or nobody."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dpex.autotune.types import Decision
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings


class Steering(Protocol):
    """What a simulated loader asks: the settings to begin with, and, window by window, what to change."""

    def begin(self) -> Settings:
        """Settings at the start."""

    def step(self, window: Reading) -> Decision | None:
        """A change, or None."""


@dataclass(frozen=True)
class Fixed:
    """A steering that never changes anything: what the exhaustive search tries."""

    settings: Settings

    def begin(self) -> Settings:
        """See `Steering.begin`."""
        return self.settings

    def step(self, window: Reading) -> Decision | None:
        """See `Steering.step`."""
        return None
