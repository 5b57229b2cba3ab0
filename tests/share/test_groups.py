"""Ranks of one job that share: those with the same ``share_rank``, as real processes and in real process groups."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from families import is_alive
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DistributedSampler
from trainings import BATCH, SAMPLES, SHARE, Noted, Training, alone, notes_in
from waiting import until

from dpex import OptionError
from dpex.options import WorkerConfig

RANKS, DATA = 4, 2
CHECKOUT = Path(__file__).parents[2]


@pytest.fixture
def notes(tmp_path: Path) -> Iterator[Path]:
    """Where samples are noted; all processes that made one have ended when the test has."""
    path = tmp_path / "notes"
    yield path
    pids = {pid for note in notes_in(path) for pid in (note.worker, note.template)}
    until(lambda: not any(map(is_alive, pids)))


def order(part: int) -> DistributedSampler[int]:
    return DistributedSampler(list(range(SAMPLES)), DATA, part, seed=3)


def test_ranks_of_a_group_share_and_divide_the_cpus_by_groups(notes: Path, tmp_path: Path) -> None:
    """Two data-parallel ranks, of two tensor-parallel ranks each. The first rank of a group learns of the second from a
    report without batches: the second has ended before the first asks for its last batch."""
    environ = {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    ranks = [
        Training(
            Noted(notes),
            environ={**environ, "RANK": str(rank)},
            worker_config=WorkerConfig(share=SHARE, share_rank=rank // 2),
            sampler=order(rank // 2),
            shuffle=None,
        )
        for rank in range(RANKS)
    ]
    try:
        got = [training.take(1) for training in ranks]
        for rank in reversed(range(RANKS)):
            got[rank] += ranks[rank].take()
        assert _calls(notes) == Counter(range(SAMPLES))
        assert [training.sharing_ranks for training in ranks] == [2] * RANKS
        for part in range(DATA):
            expected = alone(Noted(tmp_path / "others"), sampler=order(part), shuffle=None)
            assert got[2 * part] == got[2 * part + 1] == expected
            assert len(expected) == SAMPLES // DATA // BATCH
    finally:
        for training in ranks:
            training.close()


def _calls(notes: Path) -> Counter[int]:
    return Counter(note.index for note in notes_in(notes))


def test_share_rank_is_a_dimension_of_a_device_mesh(tmp_path: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        assert WorkerConfig(share="a", share_rank=mesh["dp"]).share_rank == 0
        with pytest.raises(OptionError, match=r"has the place .* in that mesh; give one dimension"):
            WorkerConfig(share="a", share_rank=mesh)
    finally:
        dist.destroy_process_group()


@pytest.mark.long
def test_groups_of_a_real_job_get_the_batches_of_ranks_alone() -> None:
    """The benchmark compares every byte with that of ranks that load for themselves, or that broadcast."""
    command = [sys.executable, "-m", "benchmarks.groups", "--check", "--work", "tokens", "--batches", "3"]
    done = subprocess.run(
        [*command, "--tensor", "2"],
        cwd=CHECKOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "all batches are the same, byte by byte" in done.stdout
