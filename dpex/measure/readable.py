"""Numbers as people read them, the same in all reports, decisions and messages. PURE.

Numbers have three digits, or all digits before the decimal point if that is more. A space separates a number from its
unit. A prefix of bytes is a power of 1000 (k, M, G, T), or of 1024 with an i (Ki, Mi, Gi, Ti), as in Kubernetes. Clocks
have errors, so a part may be measured as longer than the whole. Use `remainder` to subtract measured times.
"""

from __future__ import annotations

import re
from typing import Any

_DECIMALS_BELOW = 0.0995
"""`fine_percent` shows smaller shares, which round to less than 10 %, with one decimal."""
_WHOLE_FROM = 99.5
"""Numbers of at least this value are shown without decimals, because they have three digits before the point."""
_NEXT_UNIT = 0.9995
"""A value is shown in the largest unit in which it is at least this number, which is rounded to 1: "1 ms", not
"1,000 µs"; "1 MB", not "1,000 kB"."""
_PREFIXES = ("", "k", "M", "G", "T")
_SIZE = re.compile(r"(?P<number>\d+(?:\.\d+)?) ?(?P<prefix>[kMGT]?)(?P<binary>i?)B?", re.IGNORECASE)
"""A number of bytes as people write it."""
_CLOCK_S = 1e-7
"""Seconds that reading a clock takes. A shorter measured time is shown as 0 s."""


def rounded(value: float) -> str:
    """Return a number with three digits, or with all digits before the decimal point: "0.5", "12.3", "1,235"."""
    return f"{value:,.0f}" if abs(value) >= _WHOLE_FROM else f"{value:.3g}"


def percent(ratio: float) -> str:
    """Return a share of 1 as whole percent: 0.381 is "38 %"."""
    return f"{100 * ratio:.0f} %"


def fine_percent(ratio: float) -> str:
    """Return a share of 1 in percent, small ones with one decimal: 0.381 is "38 %", and 0.0381 is "3.8 %"."""
    return f"{100 * ratio:.1f} %" if 0 < abs(ratio) < _DECIMALS_BELOW else percent(ratio)


def duration(seconds: float) -> str:
    """Return a time in the unit that suits it: "1.24 s", "35 ms", "80 µs"."""
    if abs(seconds) < _CLOCK_S:
        return "0 s"
    units = ((1.0, "s"), (1e3, "ms"), (1e6, "µs"))
    factor, unit = next((one for one in units if abs(seconds) * one[0] >= _NEXT_UNIT), units[-1])
    return f"{rounded(seconds * factor)} {unit}"


def size(nbytes: float) -> str:
    """Return a number of bytes in the unit that suits it: "38 MB"."""
    for power in (3, 2, 1):
        if abs(nbytes) >= _NEXT_UNIT * 1000**power:
            return f"{rounded(nbytes / 1000**power)} {_PREFIXES[power]}B"
    return f"{nbytes:.0f} B"


def byte_count(value: Any) -> Any:
    """Return the number of bytes that a text such as "2G", "1.5 GiB" or "500 MB" names.

    Any other value is returned unchanged, so that the check of the number can refuse it.
    """
    found = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        return value
    power = [prefix.lower() for prefix in _PREFIXES].index(found["prefix"].lower())
    return round(float(found["number"]) * (1024 if found["binary"] else 1000) ** power)


def remainder(whole_s: float, *parts_s: float) -> float:
    """Subtract parts from a time, in seconds; 0 if the parts were measured as longer than the time."""
    return max(0.0, whole_s - sum(parts_s))


def plural(count: int, what: str) -> str:
    """Return a count with its noun: "1 stream", "2 streams"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
