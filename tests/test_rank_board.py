"""Ranks of a job on one machine divide its CPUs by need: the file they share, and two ranks that train."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from dpex.autotune.need import load_of, with_cpus
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import MachineSample, PoolSample
from dpex.schedule.rank_shares import RankLoad
from dpex.system.rank_board import FORGOTTEN_S, PREFIX, RankBoard, RankShare, board_of, job_name, rank_name

DEAR = RankLoad(cpu_s=0.4, rate=5.0, wait=0.5, used=2.0)
CHEAP = RankLoad(cpu_s=0.1, rate=5.0, wait=0.0, used=0.5)
TORCHRUN = {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


class Job:
    """Ranks of one machine, on a clock that a test moves."""

    def __init__(self, folder: Path, ranks: int = 2, total: float = 6.0) -> None:
        folder.chmod(0o700)
        self.now = 0.0
        self.path = folder / "ranks.json"
        self.boards = [
            RankBoard(
                folder, own=True, name="ranks.json", rank=str(rank), ranks=ranks, total=total, clock=lambda: self.now
            )
            for rank in range(ranks)
        ]

    def report(self, rank: int, load: RankLoad) -> float:
        found = self.boards[rank].report(load)
        assert found is not None
        return found.cpus

    def held(self) -> dict[str, float]:
        return {rank: entry["held"] for rank, entry in json.loads(self.path.read_text()).items()}


def test_the_dearer_rank_gets_what_the_other_gives_back(tmp_path: Path) -> None:
    job = Job(tmp_path)
    assert job.report(1, DEAR) == 3.0, "the other rank has said nothing yet"
    assert job.report(0, CHEAP) == pytest.approx(1.2, abs=0.15)
    assert job.report(1, DEAR) == pytest.approx(4.8, abs=0.15)
    assert job.report(0, DEAR) == pytest.approx(1.2, abs=0.15), "the other still holds the rest"
    assert job.report(1, DEAR) == 3.0
    assert job.report(0, DEAR) == 3.0


def test_what_other_ranks_keep_busy_is_known(tmp_path: Path) -> None:
    job = Job(tmp_path, ranks=3)
    first, second = job.boards[0].report(CHEAP), job.boards[1].report(DEAR)
    assert first is not None
    assert second is not None
    assert first.used_by_others == 2 * CHEAP.used, "of who says nothing it is taken to be as much"
    assert second.used_by_others == CHEAP.used + DEAR.used


def test_a_rank_that_says_nothing_for_a_while_has_an_equal_part(tmp_path: Path) -> None:
    job = Job(tmp_path)
    for _ in range(2):
        job.report(0, CHEAP)
        job.report(1, DEAR)
    job.now += FORGOTTEN_S + 1
    assert job.report(1, DEAR) == 3.0


def test_the_last_rank_removes_the_file(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.report(0, CHEAP)
    job.report(1, DEAR)
    job.boards[0].leave()
    assert list(job.held()) == ["1"]
    job.boards[1].leave()
    job.boards[1].leave()
    assert not job.path.exists()


def test_the_last_rank_of_all_jobs_removes_the_directory(tmp_path: Path) -> None:
    """Whoever comes later makes another."""
    folder = tmp_path / "jobs"
    folder.mkdir()
    job, other = Job(folder), Job(folder)
    for board in other.boards:
        board._name = "ranks of another job"
    job.report(0, CHEAP)
    other.boards[1].report(DEAR)
    job.boards[0].leave()
    assert [path.name for path in folder.iterdir()] == ["ranks of another job"]
    other.boards[1].leave()
    assert not folder.exists()
    assert job.report(1, DEAR) == 3.0
    assert folder.stat().st_mode & 0o777 == 0o700
    job.boards[1].leave()
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_the_user_gave_stays(tmp_path: Path) -> None:
    board = board_of({**TORCHRUN, "DPEX_METRICS_DIR": str(tmp_path / "given")})
    assert board is not None
    assert board.report(CHEAP) is not None
    board.leave()
    assert list((tmp_path / "given").iterdir()) == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"0": 1}', '{"0": {"load": {}, "at": 1, "held": NaN}}'])
def test_a_file_that_is_none_of_ours_is_written_anew(tmp_path: Path, text: str) -> None:
    job = Job(tmp_path)
    job.path.write_text(text)
    assert job.report(1, DEAR) == 3.0


def test_where_no_file_can_be_used_cpus_are_divided_evenly(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.path.symlink_to(tmp_path / "elsewhere")
    assert job.boards[0].report(CHEAP) is None
    job.boards[0].leave()
    assert not (tmp_path / "elsewhere").exists()


def test_ranks_never_hold_more_than_there_is(tmp_path: Path) -> None:
    """In whatever order they report, with more or less time between two reports."""
    job, draw = Job(tmp_path, ranks=4, total=8.0), random.Random(0)
    most = 0.0
    for _ in range(300):
        job.now += draw.choice((0.1, 1.0, FORGOTTEN_S / 2))
        job.report(draw.randrange(4), draw.choice((DEAR, CHEAP, RankLoad())))
        held = job.held().values()
        assert sum(held) <= 8.0 + 1e-9
        most = max(most, *held)
    assert most > 3.0


# -- jobs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("environ", "is_told"),
    [
        (TORCHRUN, True),
        ({"SLURM_JOB_ID": "1", "SLURM_LOCALID": "0", "SLURM_NTASKS_PER_NODE": "4"}, True),
        ({"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}, False),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "1"}, False),
        ({name: value for name, value in TORCHRUN.items() if name != "LOCAL_RANK"}, False),
        ({}, False),
    ],
)
def test_only_ranks_whose_job_is_told_share(environ: dict[str, str], is_told: bool, tmp_path: Path) -> None:
    assert (board_of({**environ, "DPEX_METRICS_DIR": str(tmp_path)}) is not None) == is_told


def test_jobs_are_told_apart() -> None:
    names = {
        job_name(TORCHRUN, "net"),
        job_name(TORCHRUN, "another net"),
        job_name({**TORCHRUN, "MASTER_PORT": "29501"}, "net"),
        job_name({**TORCHRUN, "TORCHELASTIC_RUN_ID": "x"}, "net"),
    }
    assert len(names) == 4
    assert job_name(TORCHRUN, "net") == job_name({**TORCHRUN, "LOCAL_RANK": "0"}, "net")
    assert rank_name(TORCHRUN) == "1"


def test_files_of_jobs_that_were_killed_are_removed(tmp_path: Path) -> None:
    old, new, other = (tmp_path / name for name in (f"{PREFIX}old", f"{PREFIX}new", "other"))
    for path in (old, new, other):
        path.touch()
    for path in (old, other):
        os.utime(path, (0, 0))
    assert board_of({**TORCHRUN, "DPEX_METRICS_DIR": str(tmp_path)}) is not None
    assert sorted(tmp_path.iterdir()) == [other, new]


def test_loaders_of_a_rank_share_one_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**TORCHRUN, "DPEX_METRICS_DIR": str(tmp_path)}.items():
        monkeypatch.setenv(name, value)
    share = RankShare()
    first, second = share.report(1, CHEAP), share.report(2, DEAR)
    assert first is not None
    assert second is not None
    (path,) = tmp_path.iterdir()
    told = json.loads(path.read_text())["1"]["load"]
    assert RankLoad(**told) == CHEAP.plus(DEAR)
    share.leave(1)
    assert path.exists()
    share.leave(2)
    share.leave(2)
    assert not path.exists()


# -- windows -----------------------------------------------------------------------------------------------------------

WINDOW = Sample(
    at=1.0,
    seconds=1.0,
    settings=Settings(local=1),
    batches=10,
    wait_s=0.4,
    work_s=0.6,
    local=PoolSample(tickets=10, cpu_s=1.0),
    machine=MachineSample(cpus=2.0, others=0.5, trainer_cpu_s=0.5),
)


def test_what_a_window_says_of_a_rank() -> None:
    assert load_of(WINDOW) == RankLoad(cpu_s=0.15, rate=10.0, wait=0.4, used=1.5)
    stalled = Sample(**{**vars(WINDOW), "gpu_stall_s": 0.1, "gpu_steps": 10, "gpu_step_s": 0.9})
    load = load_of(stalled)
    assert load is not None
    assert load.wait == pytest.approx(0.1), "what the GPU lost, not what the loop waited"
    assert load_of(Sample(at=1.0, seconds=1.0, settings=Settings())) is None


def test_others_keep_the_same_part_of_the_cpus_busy() -> None:
    assert with_cpus(WINDOW, 4.0).machine == MachineSample(cpus=4.0, others=1.0, trainer_cpu_s=0.5)


# -- two ranks ---------------------------------------------------------------------------------------------------------

RANK = """
import json, os, sys, time
import torch, torch.distributed as dist
from torch.utils.data import Dataset
import dpex.system.rank_board as board
from dpex import DpexDataLoader
from dpex.autotune.law import Law

rank = int(os.environ["LOCAL_RANK"])
board.usable_cpus = lambda: 8.0
dist.init_process_group("gloo", init_method="file://" + sys.argv[1], rank=rank, world_size=2)

class Data(Dataset):
    def __len__(self):
        return 10**6
    def __getitem__(self, index):
        until = time.thread_time() + (0.008 if rank else 0.0004)
        while time.thread_time() < until:
            pass
        return torch.zeros(4)

seen = []
step = Law.step

def watched(self, sample):
    seen.append(sample.machine.cpus)
    return step(self, sample)

Law.step = watched
held, apart = 4.0, torch.zeros(2)
deadline = time.monotonic() + 90
with DpexDataLoader(Data(), batch_size=2, num_workers="auto") as loader:
    for batch in loader:
        held = seen[-1] if seen else 4.0
        apart = torch.tensor([held if rank == n else 0.0 for n in range(2)])
        dist.all_reduce(apart)
        late = torch.tensor([float(time.monotonic() > deadline)])
        dist.all_reduce(late)
        if apart[1] > 2 * apart[0] or late[0]:
            break
dist.barrier()
dist.destroy_process_group()
print(json.dumps(apart.tolist()))
"""


def test_of_two_ranks_the_one_with_dearer_data_is_given_more_cpus(tmp_path: Path) -> None:
    """Each rank is one of two on a machine of 8 CPUs, as far as the division knows."""
    common = {"LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "1", "OMP_NUM_THREADS": "1"}
    (tmp_path / "temporary").mkdir()
    environment = {**os.environ, **common, "TMPDIR": str(tmp_path / "temporary")}
    for name in ("XDG_RUNTIME_DIR", "DPEX_METRICS_DIR"):
        environment.pop(name, None)
    processes = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", RANK, str(tmp_path / "meeting")],
            env=environment | {"LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    told = [process.communicate(timeout=150)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    cheap, dear = json.loads(told[0])
    assert dear > 2 * cheap
    assert cheap + dear <= 8.0 + 1e-3
    assert list((tmp_path / "temporary").iterdir()) == [], "nothing is left of what they shared"
