"""The settings of the tuner: the meaning, the range, and the reason for the default of each."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from dpex.errors import OptionError


def _knob(value: object, low: float, high: float = math.inf, *, whole: bool = False, optional: bool = False) -> bool:
    if value is None:
        return optional
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return low <= value <= high


@dataclass(frozen=True, kw_only=True)
class AutotuneConfig:
    """Settings of the law behind ``num_workers="auto"``. Values of None are found from measurements.

    Args:
        max_local: The most local workers (0 or more). None: as many as memory allows; for work that needs CPUs as many
            as this process may use, for work that waits up to ``max_waiting``.
        max_remote: The most remote workers (0 or more). Up to that number a cluster with an autoscaler is asked for
            nodes where more workers pay. None: what the cluster has room for, and no node is asked for.
        max_waiting: The most local workers where these mostly wait (1 to 1024). 64 processes that wait take some 4 GB
            in the worst case, and no storage was seen to reward more from one machine.
        min_local: The fewest local workers (0 or more). 0: unused capacity is given back.
        min_remote: The fewest remote workers (0 or more). 0: unused capacity is given back.
        max_prefetch: The largest prefetch, in batches (1 or more). None: what memory allows.
        max_streams: The most streams of an iterable dataset under ``num_workers="auto"`` (1 or more). There is one for
            each shard that the dataset names in ``num_shards``, ``n_shards`` or as URLs of webdataset, and one if it
            names none. None: at most one for each CPU of this rank. Give a number where ranks run on machines
            with different CPUs, as all ranks need the same number, and where reading mostly waits. Streams are never
            tuned, as their number decides what each of them reads.
        wait_goal: The share of the training loop's time lost to loading that is acceptable (0 to 0.5). 0.01:
            below one percent, a measurement of a second cannot tell it from noise.
        headroom: Capacity for which workers are started, over what the training loop takes (1 to 3), so that a slower
            moment costs no wait. 1.2: the times of batches vary by a fifth from one moment to the next.
        gain: The relative gain in rate from which a cluster is asked for places that no node has yet (0.005 to 1).
            0.04: windows cannot show less.
        shrink_after: Windows in a row without waiting before workers are given back (1 to 100). 16: giving back too
            early costs a wait, too late costs only CPUs.
        cluster_weight: This loader's share of a Ray cluster relative to that of other loaders (0.01 to 100). 1: all
            have equal shares, and what a loader has no use for goes to the others.
        memory_share: The part of the memory that is free without them that workers and batches in flight may fill (0.01
            to 0.9). 0.5: the training process's own memory grows after its first steps.
        interval_s: Seconds between windows once the work is known (0.05 to 60); at first they are shorter.
        trace: A file in which the run is recorded for ``dpex replay``, some 1.2 kB for each window.
            ``{pid}`` and ``{rank}`` in it are filled in; a file that exists is left alone, and the name gets a number.
            None: the environment variable ``DPEX_TRACE`` says where, and without it nothing is recorded.

    Raises:
        OptionError: A value is out of its range. It is a ValueError.

    Examples:
        >>> from dpex import AutotuneConfig, DpexDataLoader
        >>> loader = DpexDataLoader([1, 2, 3], num_workers="auto", autotune=AutotuneConfig(max_local=4))
        >>> try:
        ...     AutotuneConfig(max_local=-1)
        ... except ValueError as error:
        ...     print(error)
        AutotuneConfig(max_local=-1): give a whole number of at least 0, or None
    """

    max_local: int | None = None
    max_remote: int | None = None
    max_waiting: int = 64
    min_local: int = 0
    min_remote: int = 0
    max_prefetch: int | None = None
    max_streams: int | None = None
    wait_goal: float = 0.01
    headroom: float = 1.2
    gain: float = 0.04
    shrink_after: int = 16
    cluster_weight: float = 1.0
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
                raise OptionError(f"AutotuneConfig({name}={value!r}): give {kind} of at least {low:g}{upper}{none}")
        if self.trace is not None and (not isinstance(self.trace, str) or not self.trace):
            raise OptionError(f"AutotuneConfig(trace={self.trace!r}): give a file's name, as a str, or None")
        for low_name, high_name in (("min_local", "max_local"), ("min_remote", "max_remote")):
            low_value, high_value = getattr(self, low_name), getattr(self, high_name)
            if high_value is not None and low_value > high_value:
                raise OptionError(
                    f"AutotuneConfig({low_name}={low_value}, {high_name}={high_value}): the least is above the most"
                )


_RANGES: tuple[tuple[str, float, float, bool, bool], ...] = (
    ("max_local", 0, math.inf, True, True),
    ("max_remote", 0, math.inf, True, True),
    ("max_waiting", 1, 1024, True, False),
    ("min_local", 0, math.inf, True, False),
    ("min_remote", 0, math.inf, True, False),
    ("max_prefetch", 1, math.inf, True, True),
    ("max_streams", 1, math.inf, True, True),
    ("wait_goal", 0, 0.5, False, False),
    ("headroom", 1, 3, False, False),
    ("gain", 0.005, 1, False, False),
    ("shrink_after", 1, 100, True, False),
    ("cluster_weight", 0.01, 100, False, False),
    ("memory_share", 0.01, 0.9, False, False),
    ("interval_s", 0.05, 60, False, False),
)
assert {"trace", *(row[0] for row in _RANGES)} == {field.name for field in fields(AutotuneConfig)}
