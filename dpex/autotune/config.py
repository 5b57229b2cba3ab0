"""Limits and knobs of the controller: meaning, range, and why the default is what it is."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


class ConfigError(ValueError):
    """A value that the controller cannot work with; the message names it and what would do."""


def _knob(value: object, low: float, high: float = math.inf, *, whole: bool = False, optional: bool = False) -> bool:
    if value is None:
        return optional
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return low <= value <= high


@dataclass(frozen=True, kw_only=True)
class AutotuneConfig:
    """Everything that can be set about tuning.

    Args:
        max_local: local workers at most (0 or more). None: as many as memory allows, and for work that needs CPUs as
            many as this process may use; for work that waits, up to ``max_waiting``.
        max_remote: remote workers at most. None: what the cluster has room for.
        max_waiting: local workers at most where these mostly wait (1 to 1024). 64 processes that wait cost some 4 GB
            in the worst case, and no storage was seen to reward more from one machine.
        min_local, min_remote: never fewer (0 or more). 0: capacity nobody needs is given back.
        max_depth: batches in flight at most, or None for what memory allows.
        max_streams: streams of an iterable dataset under ``num_workers="auto"``, at most one for each shard that the
            dataset names in ``num_shards`` or ``n_shards`` (1 or more). None: one for each CPU of this rank. Give it
            where ranks run on machines with different CPUs, as all ranks need the same number, and where reading mostly
            waits. Streams are never tuned: their number decides what each of them reads.
        stall_goal: share of the consumer's time lost to loading that is as good as none (0 to 0.5). 0.01: below one
            percent a measurement of a second cannot tell it from noise.
        headroom: capacity beyond what the consumer needs that is looked for first (1 to 3), so that a slower moment is
            not felt; fewer workers are taken where measured times, played through them, say that these are as fast.
            1.05: the rates of successive windows of steady work vary by some percent.
        gain: a change must promise at least this relative gain in rate (0.005 to 1). 0.04: windows cannot show less.
        shrink_after: windows in a row that must agree before capacity is given back (1 to 100). 4: giving back too
            early costs a stall, too late costs only CPUs.
        remember_s: how long a change that did not help is not tried again while the work stays the same (1 to 1e6).
            60, doubled with each further failure up to ten times.
        explore_s: at most one exploration in this time, once settled (1 to 1e6). 20: with a trial of two windows it
            costs less than a percent even if it fails.
        memory_share: part of the memory that is free without them that workers and batches in flight may fill (0.01 to
            0.9). 0.5: the trainer's own memory grows after its first steps.
        interval_s: how often windows are taken once the work is known (0.05 to 60); at first they are shorter. 1.0.
        trace: a file in which the run is recorded for ``python -m dpex.autotune.replay``, some 1.2 kB per window.
            ``{pid}`` and ``{rank}`` in it are filled in; a file that exists is left alone, and the name gets a number.
            None: the environment variable ``DPEX_TRACE`` says where, and without it nothing is recorded.

    Raises:
        ConfigError: a value out of its range.
    """

    max_local: int | None = None
    max_remote: int | None = None
    max_waiting: int = 64
    min_local: int = 0
    min_remote: int = 0
    max_depth: int | None = None
    max_streams: int | None = None
    stall_goal: float = 0.01
    headroom: float = 1.05
    gain: float = 0.04
    shrink_after: int = 4
    remember_s: float = 60.0
    explore_s: float = 20.0
    memory_share: float = 0.5
    interval_s: float = 1.0
    trace: str | None = None

    def __post_init__(self) -> None:
        for name, low, high, whole, optional in _RANGES:
            value = getattr(self, name)
            if not _knob(value, low, high, whole=whole, optional=optional):
                kind = "a whole number" if whole else "a number"
                upper = "" if high == math.inf else f" and at most {high:g}"
                none = ", or None" if optional else ""
                raise ConfigError(f"AutotuneConfig({name}={value!r}): give {kind} of at least {low:g}{upper}{none}")
        if self.trace is not None and (not isinstance(self.trace, str) or not self.trace):
            raise ConfigError(f"AutotuneConfig(trace={self.trace!r}): give a file's name, as a str, or None")
        for low_name, high_name in (("min_local", "max_local"), ("min_remote", "max_remote")):
            low_value, high_value = getattr(self, low_name), getattr(self, high_name)
            if high_value is not None and low_value > high_value:
                raise ConfigError(
                    f"AutotuneConfig({low_name}={low_value}, {high_name}={high_value}): the least is above the most"
                )


_RANGES: tuple[tuple[str, float, float, bool, bool], ...] = (
    ("max_local", 0, math.inf, True, True),
    ("max_remote", 0, math.inf, True, True),
    ("max_waiting", 1, 1024, True, False),
    ("min_local", 0, math.inf, True, False),
    ("min_remote", 0, math.inf, True, False),
    ("max_depth", 1, math.inf, True, True),
    ("max_streams", 1, math.inf, True, True),
    ("stall_goal", 0, 0.5, False, False),
    ("headroom", 1, 3, False, False),
    ("gain", 0.005, 1, False, False),
    ("shrink_after", 1, 100, True, False),
    ("remember_s", 1, 1e6, False, False),
    ("explore_s", 1, 1e6, False, False),
    ("memory_share", 0.01, 0.9, False, False),
    ("interval_s", 0.05, 60, False, False),
)
assert {"trace", *(row[0] for row in _RANGES)} == {field.name for field in fields(AutotuneConfig)}
