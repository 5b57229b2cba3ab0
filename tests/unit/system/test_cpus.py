"""How many CPUs and how much memory there are, read from folders that look like a cgroup tree."""

import os
from pathlib import Path

import pytest

from dpex.system import cpus
from dpex.system.cpus import (
    affinity,
    cgroup_cpus,
    cgroup_memory,
    local_ranks,
    parts_of_cpus,
    parts_of_machine,
    static_worker_count,
    usable_cpus,
)


def write(root: Path, place: str, text: str) -> None:
    path = root / place
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.mark.parametrize(
    ("text", "granted"),
    [
        *(("200000 100000\n", 2.0), ("50000 100000\n", 0.5), ("150000 50000", 3.0), ("250000", 2.5)),
        *(("max 100000\n", None), ("max", None), ("", None), ("\n", None)),
    ],
)
def test_a_quota(tmp_path: Path, text: str, granted: float | None) -> None:
    write(tmp_path, "job/cpu.max", text)
    assert cgroup_cpus(tmp_path, "0::/job\n") == granted
    assert cgroup_cpus(tmp_path, "0::/\n") is None
    assert cgroup_cpus(tmp_path / "missing", "") is None


@pytest.mark.parametrize(("quota", "granted"), [("250000\n", 2.5), ("-1\n", None), ("0", None)])
def test_a_quota_of_version_1(tmp_path: Path, quota: str, granted: float | None) -> None:
    write(tmp_path, "cpu/cpu.cfs_quota_us", quota)
    write(tmp_path, "cpu/cpu.cfs_period_us", "100000\n")
    assert cgroup_cpus(tmp_path, "4:cpu,cpuacct:/not/to/be/seen\n") == granted


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
    write(tmp_path, "cpu.max", "50000 100000\n")
    for place, quota in (("", root), ("a.slice/", slice_), ("a.slice/odd::job/", job)):
        write(tmp_path, f"seen/{place}cpu.max", f"{quota} 100000\n")
    (tmp_path / "seen/a.slice/odd::job/without_the_controller").mkdir()
    found = cgroup_cpus(tmp_path / "seen", "3:cpuset:/x\n0::/a.slice/odd::job/without_the_controller\n")
    assert found == tightest, "nothing above the root is read"


def test_cgroup_v1_quotas_count_at_every_level_and_beside_v2(tmp_path: Path) -> None:
    for place, quota in (("", "-1"), ("docker/", "600000"), ("docker/abc/", "200000")):
        write(tmp_path, f"cpu/{place}cpu.cfs_quota_us", quota)
        write(tmp_path, f"cpu/{place}cpu.cfs_period_us", "100000")
    write(tmp_path, "job/cpu.max", "500000 100000")
    assert cgroup_cpus(tmp_path, "3:cpu,cpuacct:/docker/abc\n") == 2.0
    assert cgroup_cpus(tmp_path, "3:cpu,cpuacct:/docker\n") == 6.0
    assert cgroup_cpus(tmp_path, "3:memory:/docker/abc\n") is None
    assert cgroup_cpus(tmp_path, "3:cpu,cpuacct:/docker\n0::/job\n") == 5.0


def test_memory(tmp_path: Path) -> None:
    for place, limit in (("", "max"), ("a/", "2000"), ("a/b/", "9000")):
        write(tmp_path, f"{place}memory.max", f"{limit}\n")
        write(tmp_path, f"{place}memory.current", "1500\n")
        write(tmp_path, f"{place}memory.stat", "anon 5\ninactive_file 70\nactive_file 60\n")
    for place, limit in (("", 1 << 62), ("docker/", 1000)):
        write(tmp_path, f"memory/{place}memory.limit_in_bytes", f"{limit}\n")
        write(tmp_path, f"memory/{place}memory.usage_in_bytes", "1500\n")
    assert cgroup_memory(tmp_path, "0::/a/b\n") == 2000 - 1500 + 70 + 30
    assert cgroup_memory(tmp_path, "0::/\n") is None
    assert cgroup_memory(tmp_path, "5:memory:/docker\n") == 0
    own = "inactive_file 0\nactive_file 0\ntotal_inactive_file 900\ntotal_active_file 200\n"
    write(tmp_path, "memory/docker/memory.stat", own)
    assert cgroup_memory(tmp_path, "5:memory:/docker\n") == 1000 - 1500 + 900 + 100
    assert cgroup_memory(tmp_path, "5:memory:/\n") is None


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


def test_cpus_to_which_slurm_has_bound_a_rank_are_its_own() -> None:
    ranks = {"SLURM_NTASKS_PER_NODE": "4"}
    assert parts_of_cpus(ranks) == 4
    assert parts_of_cpus(ranks | {"SLURM_CPUS_PER_TASK": str(len(affinity()) - 1)}) == 4
    assert parts_of_cpus(ranks | {"SLURM_CPUS_PER_TASK": str(len(affinity()))}) == 1


@pytest.mark.parametrize(("sharing", "parts"), [(1, 8), (4, 2), (8, 1), (16, 1)])
def test_ranks_that_share_batches_have_one_part(sharing: int, parts: float) -> None:
    assert parts_of_machine({"LOCAL_WORLD_SIZE": "8"}, sharing) == parts


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
