"""How many CPUs there are, read from texts and from folders that look like a cgroup tree."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dpex.system import cpus
from dpex.system.cpus import (
    cgroup_cpus,
    cgroup_path,
    local_ranks,
    parse_cfs,
    parse_cpu_max,
    static_worker_count,
    usable_cpus,
)

NOWHERE = "0::/\n"


def write(root: Path, place: str, text: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        ("200000 100000\n", 2.0),
        ("50000 100000\n", 0.5),
        ("150000 50000", 3.0),
        ("250000", 2.5),
        ("max 100000\n", None),
        ("max", None),
        ("", None),
        ("\n", None),
    ],
)
def test_cpu_max(text: str, granted: float | None) -> None:
    assert parse_cpu_max(text) == granted


@pytest.mark.parametrize(
    ("quota", "period", "granted"),
    [("400000\n", "100000\n", 4.0), ("50000", "100000", 0.5), ("-1\n", "100000\n", None), ("0", "100000", None)],
)
def test_cfs(quota: str, period: str, granted: float | None) -> None:
    assert parse_cfs(quota, period) == granted


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("0::/\n", ""),
        ("0::/user.slice/job.scope\n", "user.slice/job.scope"),
        ("12:cpu,cpuacct:/docker/abc\n0::/system.slice\n", "system.slice"),
        ("12:cpu,cpuacct:/docker/abc\n", ""),
        ("0::/odd::name\n", "odd::name"),
        ("", ""),
    ],
)
def test_cgroup_path(text: str, path: str) -> None:
    assert cgroup_path(text) == path


def test_the_group_of_a_v1_controller() -> None:
    text = "12:cpuset:/a\n11:cpu,cpuacct:/docker/abc\n0::/system.slice\n"
    assert cgroup_path(text, "cpu") == "docker/abc"
    assert cgroup_path(text, "memory") == ""


def test_v1_quotas_count_at_every_level(tmp_path: Path) -> None:
    for place, quota in (("", "-1"), ("docker/", "600000"), ("docker/abc/", "200000")):
        write(tmp_path, f"cpu/{place}cpu.cfs_quota_us", quota)
        write(tmp_path, f"cpu/{place}cpu.cfs_period_us", "100000")
    assert cgroup_cpus(tmp_path, "3:cpu,cpuacct:/docker/abc\n") == 2.0
    assert cgroup_cpus(tmp_path, "3:cpu,cpuacct:/docker\n") == 6.0
    assert cgroup_cpus(tmp_path, "3:memory:/docker/abc\n") is None


def test_no_cgroup_at_all(tmp_path: Path) -> None:
    assert cgroup_cpus(tmp_path / "missing", NOWHERE) is None
    assert cgroup_cpus(tmp_path, "") is None


def test_own_cgroup(tmp_path: Path) -> None:
    write(tmp_path, "job/cpu.max", "300000 100000\n")
    assert cgroup_cpus(tmp_path, "0::/job\n") == 3.0
    assert cgroup_cpus(tmp_path, NOWHERE) is None


@pytest.mark.parametrize(
    ("root", "slice_", "job", "tightest"),
    [
        ("max", "400000", "800000", 4.0),
        ("max", "max", "800000", 8.0),
        ("100000", "max", "max", 1.0),
        ("max",) * 3 + (None,),
    ],
)
def test_the_tightest_ancestor_counts(tmp_path: Path, root: str, slice_: str, job: str, tightest: float | None) -> None:
    for place, quota in (("", root), ("a.slice/", slice_), ("a.slice/job/", job)):
        write(tmp_path, f"{place}cpu.max", f"{quota} 100000\n")
    assert cgroup_cpus(tmp_path, "0::/a.slice/job\n") == tightest


def test_a_level_without_the_cpu_controller_is_passed_over(tmp_path: Path) -> None:
    write(tmp_path, "a/cpu.max", "200000 100000\n")
    (tmp_path / "a/b/c").mkdir(parents=True)
    assert cgroup_cpus(tmp_path, "0::/a/b/c\n") == 2.0


def test_nothing_above_the_root_is_read(tmp_path: Path) -> None:
    write(tmp_path, "cpu.max", "100000 100000\n")
    (tmp_path / "root/job").mkdir(parents=True)
    assert cgroup_cpus(tmp_path / "root", "0::/job\n") is None


def test_cgroup_v1(tmp_path: Path) -> None:
    write(tmp_path, "cpu/cpu.cfs_quota_us", "250000\n")
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    assert cgroup_cpus(tmp_path, "4:cpu,cpuacct:/docker/abc\n") == 2.5


def test_cgroup_v1_without_a_limit(tmp_path: Path) -> None:
    write(tmp_path, "cpu/cpu.cfs_quota_us", "-1\n")
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    assert cgroup_cpus(tmp_path, "") is None


def test_both_versions_mounted(tmp_path: Path) -> None:
    write(tmp_path, "cpu/cpu.cfs_quota_us", "500000\n")
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    write(tmp_path, "job/cpu.max", "700000 100000\n")
    assert cgroup_cpus(tmp_path, "0::/job\n") == 5.0


@pytest.mark.parametrize(
    ("environ", "ranks"),
    [
        ({}, 1),
        ({"LOCAL_WORLD_SIZE": "4"}, 4),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
        ({"MV2_COMM_WORLD_LOCAL_SIZE": "3"}, 3),
        ({"SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "4", "SLURM_NTASKS_PER_NODE": "8"}, 4),
        ({"LOCAL_WORLD_SIZE": "", "SLURM_NTASKS_PER_NODE": "8"}, 8),
        ({"LOCAL_WORLD_SIZE": "0"}, 1),
        ({"LOCAL_WORLD_SIZE": "-2"}, 1),
        ({"SLURM_NTASKS_PER_NODE": "4(x2)"}, 1),
        ({"WORLD_SIZE": "64"}, 1),
        ({"WORLD_SIZE": "64", "MASTER_ADDR": "10.0.0.1"}, 1),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}, 2),
        ({"WORLD_SIZE": "4", "MASTER_ADDR": "localhost", "LOCAL_WORLD_SIZE": "2"}, 2),
    ],
)
def test_local_ranks(environ: dict[str, str], ranks: int) -> None:
    assert local_ranks(environ) == ranks


@pytest.mark.parametrize(
    ("granted", "ranks", "workers"),
    [(8.0, 1, 7), (8.0, 2, 3), (8.0, 8, 1), (2.5, 1, 1), (1.0, 1, 1), (0.5, 1, 1), (4.0, 64, 1), (9.9, 3, 2)],
)
def test_static_worker_count(granted: float, ranks: int, workers: int) -> None:
    assert static_worker_count(granted, ranks) == workers


def test_the_worker_count_asks_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpus, "usable_cpus", lambda: 12.0)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert static_worker_count() == 3


@pytest.mark.parametrize(("affinity", "quota", "usable"), [(8, None, 8.0), (8, 2.5, 2.5), (2, 6.0, 2.0)])
def test_usable_cpus_is_affinity_cut_by_quota(
    monkeypatch: pytest.MonkeyPatch, affinity: int, quota: float | None, usable: float
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(affinity)), raising=False)
    monkeypatch.setattr(cpus, "cgroup_cpus", lambda: quota)
    assert usable_cpus() == usable
