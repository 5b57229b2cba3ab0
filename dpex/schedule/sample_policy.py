"""The policy for samples that cannot be loaded, and indices of batches that name the samples not to load. PURE."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from dpex.errors import OptionError

OnSampleError = Literal["raise", "skip", "replace"]
HANGS = 2
"""Workers in which a sample hangs before ``on_error`` decides. In one worker, the network or disk may have paused."""


@dataclass(frozen=True, kw_only=True)
class SamplePolicy:
    """Options for samples of a map-style dataset that cannot be loaded.

    Args:
        on_error: The action when loading a sample raises an error. ``"raise"``: the error is the error of its batch, as
            in torch. ``"skip"``: another sample of the same batch takes its place, and is in the batch twice.
            ``"replace"``: another sample of the dataset takes its place. Batches stay full and ranks in step. The first
            failure is a warning; all are logged, counted (``stats().failed_samples``) and named in the diagnosis.
        max_errors: The maximum share of samples that may fail, from 0 to 1; 1 % by default. A larger share raises
            `TooManySampleErrors`. Ten failures are always allowed.
        timeout_s: Seconds that loading a sample may take; for ``__getitems__``, times the samples. A worker that takes
            longer is ended, with a warning that shows its stack, and another worker makes the batch again. If the
            sample hangs again, ``on_error`` decides; with ``"raise"`` the error is a `SampleTimeoutError`. A sample of
            an asynchronous dataset that waits too long is cancelled, and ``on_error`` decides at once. With a limit,
            workers are processes. None: no limit.

    Raises:
        OptionError: An option has an invalid value. It is a ValueError.

    Examples:
        >>> from dpex import DpexDataLoader, SamplePolicy
        >>> loader = DpexDataLoader([1, 2, 3], num_workers=1, sample_policy=SamplePolicy(on_error="skip", timeout_s=30))
    """

    on_error: OnSampleError = "raise"
    max_errors: float = 0.01
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        share, timeout_s = self.max_errors, self.timeout_s
        if self.on_error not in ("raise", "skip", "replace"):
            raise OptionError(f"SamplePolicy(on_error={self.on_error!r}): give 'raise', 'skip' or 'replace'")
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 <= share <= 1:
            raise OptionError(f"SamplePolicy(max_errors={share!r}): give a share of the samples, from 0 to 1")
        is_number = isinstance(timeout_s, (int, float)) and not isinstance(timeout_s, bool)
        if timeout_s is not None and not (is_number and 0 < timeout_s < math.inf):
            raise OptionError(
                f"SamplePolicy(timeout_s={timeout_s!r}): give a positive number of seconds, or None for no limit"
            )

    @property
    def is_on(self) -> bool:
        """True if samples are loaded one by one, each with a guard."""
        return self.tolerates or self.timeout_s is not None

    @property
    def tolerates(self) -> bool:
        """True if batches are made without samples that fail."""
        return self.on_error != "raise"


AS_TORCH = SamplePolicy()
"""The default: a sample's error is its batch's error, and a sample has no time limit."""


ALL_AT_ONCE = -1
"""Value in place of a sample's position if the dataset loads all samples of a batch at once."""


@dataclass(frozen=True, kw_only=True)
class LeavingOut:
    """An index of a batch, and the reasons why the samples at some positions in it are not to be loaded.

    The position `ALL_AT_ONCE` means that loading all samples together took too long, and they are loaded one by one.
    """

    index: Any
    places: Mapping[int, str] = field(default_factory=dict)


def leaving_out(index: Any, place: int, why: str) -> LeavingOut | None:
    """Return ``index`` without the sample at ``place``; None if that sample was left out before and its replacement
    hung."""
    known = index if isinstance(index, LeavingOut) else LeavingOut(index=index)
    if place in known.places:
        return None
    return LeavingOut(index=known.index, places={**known.places, place: why})
