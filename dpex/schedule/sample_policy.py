"""The policy for samples that cannot be loaded, and indices that leave some of them out. PURE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OnSampleError = Literal["raise", "skip", "replace"]
HANGS = 2
"""Workers that a sample may hang in, one after the other: a network or a disk may have paused for the first."""


@dataclass(frozen=True, kw_only=True)
class SamplePolicy:
    """The user's options for samples that cannot be loaded.

    Attributes:
        on_error: The action when the loading of a sample fails.
        timeout_s: Seconds that loading a sample may take; None: no limit.
        max_errors: The share of samples that may fail.
    """

    on_error: OnSampleError = "raise"
    timeout_s: float | None = None
    max_errors: float = 0.01

    @property
    def is_on(self) -> bool:
        """True if samples are loaded one by one, each with a guard."""
        return self.tolerates or self.timeout_s is not None

    @property
    def tolerates(self) -> bool:
        """True if batches are made without samples that fail."""
        return self.on_error != "raise"


AS_TORCH = SamplePolicy()
"""An error of a sample is the error of its batch, and a sample may take as long as it wants."""


def policy_of(loader: Any) -> SamplePolicy:
    """Return the policy that a loader's options ask for."""
    return SamplePolicy(
        on_error=loader.on_sample_error, timeout_s=loader.sample_timeout_s, max_errors=loader.max_sample_errors
    )


ALL_AT_ONCE = -1
"""In place of the place of a sample where the dataset loads all samples of a batch at once."""


@dataclass(frozen=True, kw_only=True)
class LeavingOut:
    """An index of a batch, and why its samples at some places are not to be loaded.

    `ALL_AT_ONCE` among the places: loading them together took too long, so they are to be loaded one by one.
    """

    index: Any
    places: Mapping[int, str] = field(default_factory=dict)


def leaving_out(index: Any, place: int, why: str) -> LeavingOut | None:
    """Return ``index`` without the sample at ``place``; None if that was left out before and another hung there."""
    known = index if isinstance(index, LeavingOut) else LeavingOut(index=index)
    if place in known.places:
        return None
    return LeavingOut(index=known.index, places={**known.places, place: why})
