"""The settings of the tuner: the meaning, the range, and the reason for the default of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Protocol

from dpex.errors import OptionError
from dpex.hints import hinted

if TYPE_CHECKING:
    import os

    from dpex.autotune.limits import Limits
    from dpex.autotune.types import Policy
    from dpex.measure.settings import Settings


class StartSettings(Protocol):
    """Settings to start from, such as a `dpex.Tuned`."""

    def as_dict(self) -> dict[str, Any]:
        """Return the settings by name, as `dpex.Tuned.as_dict` does."""


def _knob(value: object, low: float, high: float = math.inf, *, whole: bool = False, optional: bool = False) -> bool:
    if value is None:
        return optional
    if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
        return False
    return low <= value <= high


@hinted
@dataclass(frozen=True, kw_only=True)
class AutotuneConfig:
    """Limits and goals of the tuner behind ``num_workers="auto"``. dpex determines the limits that are None.

    Args:
        max_local: The maximum number of local workers (0 or more). None: as many as memory and CPUs allow. In both
            cases the tuner also keeps to ``max_waiting``.
        max_remote: The maximum number of remote workers (0 or more). dpex asks an autoscaler for nodes up to this
            number if more workers speed up training. None: the room of the cluster, without requests for nodes.
        max_waiting: The tuner starts at most this many local workers (1 to 1024), or one per CPU or ``min_local`` if
            that is more. 64, because as many processes take up to about 4 GB, and more did not speed up any measured
            storage.
        min_local: The minimum number of local workers (0 or more). The tuner ends unused workers above it.
        min_remote: The minimum number of remote workers (0 or more). The tuner ends unused workers above it.
        max_prefetch: The maximum prefetch, in batches (1 or more). None: the limit of the memory.
        max_streams: The maximum number of streams of an iterable dataset under ``num_workers="auto"`` (1 or more). Each
            shard that the dataset names (``num_shards``, ``n_shards``, URLs of webdataset) has a stream. A dataset
            without named shards has one stream. None: at most 8, or one for each CPU of this rank if that is more.
            Give a larger number if reading mostly waits. Give any number if the ranks' machines have different CPUs,
            because all ranks need the same. dpex never tunes it, because it determines the samples of each stream.
        wait_goal: The acceptable share of the training loop's time lost to loading (0 to 0.5). A one-second
            window cannot tell shares below 0.01 from noise.
        headroom: The ratio of the workers' batch rate to the training loop's (1 to 3), so that workers that are slow
            for a moment cause no wait. 1.2, because batch times vary by a fifth from moment to moment.
        gain: The minimum predicted relative gain in rate for more workers, or for a request for more nodes (0.005 to
            1). Windows cannot measure a gain below 0.04.
        shrink_after: Consecutive windows without waiting before the tuner ends workers (1 to 100). 16, because ending
            them too early costs a wait, and ending them too late only CPUs.
        cluster_weight: The share of a Ray cluster relative to other loaders (0.01 to 100). 1: equal shares. Other
            loaders get the unused part of a share.
        memory_share: The part of the free memory that workers and batches in flight may fill (0.01 to 0.9). 0.5,
            because the training process's own memory grows after its first steps.
        interval_s: Length of a window in seconds (0.05 to 60). Windows after a start or a change are shorter.
        trace: A file for a record of the run, for a report to dpex: some 1.2 kB for each window. dpex fills in
            ``{pid}`` and ``{rank}``. If the file exists, dpex adds a number to the name. None: the file that the
            environment variable ``DPEX_TRACE`` names, or no record.
        start: Initial settings: ``loader.tuned`` of another run, its ``as_dict()``, or the name of a file from its
            ``save()``, in which dpex fills in ``{pid}`` and ``{rank}``. dpex clips them to the limits and tunes from
            there. It starts at most ``max_waiting`` local workers, or one per CPU if that is more. Remote workers start
            only if this process is connected to Ray before the first ``iter()``; otherwise the tuner finds them again.
            None: settings from the number of CPUs.
        policy: A class or function that returns a `Policy`, which chooses the settings. None: the law of dpex.

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
    start: StartSettings | Mapping[str, Any] | str | os.PathLike[str] | None = None
    policy: Callable[[AutotuneConfig, Settings, Limits], Policy] | None = None

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
        is_start = isinstance(self.start, (str, Mapping)) or {"as_dict", "__fspath__"} & {*dir(self.start)}
        if self.start is not None and not (self.start and is_start):
            raise OptionError(
                f"AutotuneConfig(start={self.start!r}): give a loader's tuned, the path of a file that its save() "
                "wrote, or None"
            )
        if self.policy is not None and not callable(self.policy):
            raise OptionError(f"AutotuneConfig(policy={self.policy!r}): give a class or function that makes a Policy")
        for low_name, high_name in (("min_local", "max_local"), ("min_remote", "max_remote")):
            low_value, high_value = getattr(self, low_name), getattr(self, high_name)
            if high_value is not None and low_value > high_value:
                raise OptionError(
                    f"AutotuneConfig({low_name}={low_value}, {high_name}={high_value}): give a minimum that is at most "
                    "the maximum"
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
assert {"trace", "start", "policy", *(row[0] for row in _RANGES)} == {field.name for field in fields(AutotuneConfig)}


def most_waiting(config: AutotuneConfig, cpus: float) -> int:
    """Return the most local workers that the tuner starts on ``cpus`` CPUs: ``max_waiting``, or one per CPU if more."""
    return max(config.max_waiting, int(cpus))


def limits_of(config: AutotuneConfig) -> Limits:
    """Return the limits that a configuration gives."""
    from dpex.autotune.constants import MOST_WORKERS
    from dpex.autotune.limits import Limits

    highest = (config.max_local, config.max_remote, config.max_prefetch)
    local, remote, prefetch = (MOST_WORKERS if most is None else most for most in highest)
    least = {"least_local": config.min_local, "least_remote": config.min_remote}
    return Limits(local=local, remote=remote, prefetch=prefetch, **least)
