"""Count the CPUs and the memory that this process may use, by affinity, cgroups, and the other ranks on this machine.

The tightest limit of this process's cgroup and of the cgroups above it counts. A container hides some of these cgroups,
but never the root. Both versions of cgroups are read: version 2 has one tree, version 1 one for each controller.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")
_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_ROOT = Path("/sys/fs/cgroup")
_CFS = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
_UNLIMITED = 1 << 60
"""Version 1 of cgroups shows a limit of this many bytes or more if there is no limit."""
_CACHED = {"inactive_file": 1, "active_file": 2}
"""File cache in ``memory.stat`` that the kernel takes back before it refuses memory. One over this number of it counts.
Version 1 has the sums with child cgroups as ``total_inactive_file`` and so on."""


def rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this training process among all, as launchers set it; 0 without a launcher."""
    return _first(environ, _RANKS, 0)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of training processes on this machine, at least 1.

    Launchers set it as ``LOCAL_WORLD_SIZE`` or under a name of their own. Lightning's launcher sets only
    ``WORLD_SIZE``, which is the same number if the ranks meet at a loopback address.
    """
    names = (*_LOCAL_RANKS, "WORLD_SIZE") if environ.get("MASTER_ADDR") in _LOOPBACK else _LOCAL_RANKS
    return _first(environ, names, 1)


def ranks(environ: Mapping[str, str]) -> int:
    """Return the number of ranks of the job, at least 1."""
    return _first(environ, ("WORLD_SIZE",), 1)


def _first(environ: Mapping[str, str], names: Iterable[str], least: int) -> int:
    """Return the first number of at least ``least`` among these variables, else ``least``."""
    values = (environ.get(name, "") for name in names)
    return next((int(text) for text in values if text.isascii() and text.isdigit() and int(text) >= least), least)


def parts_of_machine(environ: Mapping[str, str], sharing_ranks: int = 1) -> float:
    """Return the number of equal parts into which this machine is divided: one for each ``sharing_ranks`` ranks.

    It is at least 1. Ranks that share their batches have one part together, because they share their workers.
    """
    return max(1.0, local_ranks(environ) / max(1, sharing_ranks))


def parts_of_cpus(environ: Mapping[str, str], sharing_ranks: int = 1) -> float:
    """Return the number of equal parts into which the CPUs of this process's affinity are divided, at least 1.

    It is `parts_of_machine`, but 1 where Slurm has bound each rank to CPUs of its own (``--cpus-per-task``).
    """
    bound = _first(environ, ("SLURM_CPUS_PER_TASK",), 0)
    return 1.0 if len(affinity()) <= bound else parts_of_machine(environ, sharing_ranks)


def affinity() -> Collection[int]:
    """Return the numbers of the CPUs on which this process may run."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def usable_cpus() -> float:
    """Return the CPUs that this process may use: the CPUs of its affinity, and at most the cgroup's quota."""
    cpus, quota = float(len(affinity())), cgroup_cpus()
    return cpus if quota is None else min(cpus, quota)


def static_worker_count(cpus: float | None = None, ranks: int | None = None) -> int:
    """Return the workers for ``num_workers="auto"`` before any measurement: this rank's CPUs less one."""
    return max(1, rank_cpus(cpus, ranks) - 1)


def rank_cpus(cpus: float | None = None, ranks: int | None = None) -> int:
    """Return the number of whole CPUs of this rank, at least 1."""
    cpus = usable_cpus() if cpus is None else cpus
    parts = parts_of_cpus(os.environ) if ranks is None else ranks
    return max(1, math.floor(cpus / parts))


# -- cgroups -----------------------------------------------------------------------------------------------------------


def cgroup_cpus(root: Path = _ROOT, proc_self_cgroup: str | None = None) -> float | None:
    """Return the CPUs that the tightest quota grants; None without a quota."""
    granted = [
        _granted(*texts)
        for place in _folders(root, "cpu", proc_self_cgroup)
        for texts in (_text(place / "cpu.max").split(), [_text(place / name) for name in _CFS])
    ]
    return min((cpus for cpus in granted if cpus is not None), default=None)


def _granted(quota: str = "", period: str = "") -> float | None:
    """Return the CPUs of a quota, or None without a quota: "max", -1, or an empty text."""
    return int(quota) / int(period or 100_000) if quota.isdigit() and int(quota) else None


def cgroup_memory(root: Path = _ROOT, proc_self_cgroup: str | None = None) -> int | None:
    """Return the bytes that the cgroup may still take, with file cache that it can give up; None without a limit."""
    rooms = [
        _room(place, *names)
        for place in _folders(root, "memory", proc_self_cgroup)
        for names in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
    ]
    return min((room for room in rooms if room is not None), default=None)


def _room(place: Path, limit_name: str, usage_name: str) -> int | None:
    limit, usage = _text(place / limit_name), _text(place / usage_name)
    if not limit.isdigit() or int(limit) >= _UNLIMITED or not usage.isdigit():
        return None
    pairs = (line.partition(" ") for line in _text(place / "memory.stat").splitlines())
    found = {name: int(value) for name, _, value in pairs if name.removeprefix("total_") in _CACHED}
    cached = sum(found.get(f"total_{name}", found.get(name, 0)) // part for name, part in _CACHED.items())
    return max(0, int(limit) - int(usage) + cached)


def _folders(root: Path, controller: str, proc_self_cgroup: str | None) -> Iterator[Path]:
    """Yield the folders of this process's cgroup and of the cgroups above it, for version 2 and for a controller of
    version 1."""
    text = _text(Path("/proc/self/cgroup")) if proc_self_cgroup is None else proc_self_cgroup
    own = {root: "", root / controller: ""}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            own[root] = path
        elif controller in controllers.split(","):
            own[root / controller] = path
    for base, path in own.items():
        parts = Path(path.lstrip("/")).parts
        yield from (base.joinpath(*parts[:level]) for level in range(len(parts), -1, -1))


def _text(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text().strip()
    return ""
