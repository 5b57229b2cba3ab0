"""Count the CPUs that this process may use, by affinity, cgroup quota, and the other ranks on this machine.

The parsers take text, so that they can be tested on any machine.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path

_CGROUP_ROOT = Path("/sys/fs/cgroup")

_RANKS = ("RANK", "OMPI_COMM_WORLD_RANK", "SLURM_PROCID")


def parse_cpu_max(text: str) -> float | None:
    """CPUs granted by a cgroup-v2 ``cpu.max`` file (``"200000 100000"`` is 2.0), None for ``"max ..."``."""
    quota, _, period = text.strip().partition(" ")
    if quota == "max" or not quota:
        return None
    return int(quota) / int(period or 100_000)


def parse_cfs(quota_text: str, period_text: str) -> float | None:
    """CPUs granted by cgroup v1 (``cpu.cfs_quota_us``, ``cpu.cfs_period_us``), None when the quota is -1."""
    quota = int(quota_text)
    return None if quota <= 0 else quota / int(period_text)


def cgroup_path(proc_self_cgroup: str, controller: str = "") -> str:
    """Path of this process in the cgroup-v2 tree, or in that of a v1 controller, from ``/proc/self/cgroup``'s text."""
    for line in proc_self_cgroup.splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in controllers.split(","):
            return path.lstrip("/")
    return ""


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None


def cgroup_cpus(root: Path = _CGROUP_ROOT, proc_self_cgroup: str | None = None) -> float | None:
    """The tightest CPU quota on the way from this process's cgroup up to the root, or None without a quota."""
    if proc_self_cgroup is None:
        proc_self_cgroup = _read(Path("/proc/self/cgroup")) or ""
    quotas = [_quota_v2(place) for place in _upwards(root, cgroup_path(proc_self_cgroup))]
    quotas += [_quota_v1(place) for place in _upwards(root / "cpu", cgroup_path(proc_self_cgroup, "cpu"))]
    return min((quota for quota in quotas if quota is not None), default=None)


def _upwards(root: Path, path: str) -> list[Path]:
    """The folder of a cgroup and those above it; in a container some are not to be seen, the root always is."""
    parts = Path(path).parts
    return [root.joinpath(*parts[:level]) for level in range(len(parts), -1, -1)]


def _quota_v2(place: Path) -> float | None:
    text = _read(place / "cpu.max")
    return parse_cpu_max(text) if text else None


def _quota_v1(place: Path) -> float | None:
    quota, period = _read(place / "cpu.cfs_quota_us"), _read(place / "cpu.cfs_period_us")
    return parse_cfs(quota, period) if quota and period else None


_LOCAL_RANKS = ("LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "SLURM_NTASKS_PER_NODE")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


def rank(environ: Mapping[str, str]) -> int:
    """Return the rank of this training process among all, as launchers set it; 0 if they did not."""
    said = (environ.get(name, "") for name in _RANKS)
    return next((int(value) for value in said if value.isascii() and value.isdigit()), 0)


def local_ranks(environ: Mapping[str, str]) -> int:
    """Return the number of training processes on this machine, at least 1.

    Launchers set it as ``LOCAL_WORLD_SIZE`` or under a name of their own. Lightning's launcher sets only
    ``WORLD_SIZE``, which is the same number if the ranks meet at a loopback address.
    """
    names = (*_LOCAL_RANKS, "WORLD_SIZE") if environ.get("MASTER_ADDR") in _LOOPBACK else _LOCAL_RANKS
    for name in names:
        value = environ.get(name, "")
        if value.isascii() and value.isdigit() and int(value) > 0:
            return int(value)
    return 1


def usable_cpus() -> float:
    """CPUs this process may use: affinity, cut by the cgroup quota."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = float(len(affinity(0)) if affinity else os.cpu_count() or 1)
    quota = cgroup_cpus()
    return cpus if quota is None else min(cpus, quota)


def static_worker_count(cpus: float | None = None, ranks: int | None = None) -> int:
    """Workers for ``num_workers="auto"`` before anything was measured: this rank's CPUs less one for the trainer."""
    return max(1, rank_cpus(cpus, ranks) - 1)


def rank_cpus(cpus: float | None = None, ranks: int | None = None) -> int:
    """Whole CPUs that are this rank's, at least one."""
    cpus = usable_cpus() if cpus is None else cpus
    ranks = local_ranks(os.environ) if ranks is None else ranks
    return max(1, math.floor(cpus / ranks))
