"""Differences of seconds that were measured apart. PURE.

Each clock has an error of its own, so a part may be measured as longer than the whole. A duration is never below 0, and
every difference of two measurements that a person may read, or that something is decided by, goes through `remainder`.
"""

from __future__ import annotations


def remainder(whole_s: float, *parts_s: float) -> float:
    """Return what is left of a time without its parts, in seconds; 0 where these were measured as longer than it.

    Examples:
        >>> remainder(2.0, 0.5, 0.25)
        1.25
        >>> remainder(0.0884, 0.7644)
        0.0
    """
    return max(0.0, whole_s - sum(parts_s))
