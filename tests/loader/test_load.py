"""Many at once: loaders in one process, and ranks on one machine. All batches are right, and nothing stays or grows."""

import gc
import json
import multiprocessing
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from families import Augmented, WhoMadeIt, assert_same, seeded, stacked
from programs import ran
from torch.utils.data import DistributedSampler
from waiting import until

from benchmarks.soak import ALLOWED, Look, report
from dpex import DpexDataLoader

ROOT = Path(__file__).parents[2]
LOADERS = 50
RANKS = 8
SHAPE: dict[str, Any] = {"batch_size": 4, "shuffle": True, "seeding": "batch"}


def held() -> tuple[int, int, int]:
    """Threads, descriptors and living descendants of this process."""
    gc.collect()
    me = psutil.Process()
    return threading.active_count(), me.num_fds(), len(me.children(recursive=True))


def train_with_all() -> None:
    """Take batches from one loader after the other until all have come to their end."""
    expected = stacked(DpexDataLoader(Augmented(40), **SHAPE, generator=seeded()))
    loaders = [DpexDataLoader(Augmented(40), **SHAPE, num_workers=1, generator=seeded()) for _ in range(LOADERS)]
    iterators = [iter(loader) for loader in loaders]
    got = list(zip(*iterators, strict=True))
    assert [(loader.stats().batches, loader.stats().deaths) for loader in loaders] == [(10, 0)] * LOADERS
    for batches in zip(*got, strict=True):
        assert_same(torch.cat(batches), expected)
    for loader in loaders:
        loader.close()


def test_fifty_loaders_in_one_process_leave_nothing() -> None:
    with DpexDataLoader(Augmented(4), **SHAPE, num_workers=1) as loader:
        assert len(list(loader)) == 1
    before = held()
    train_with_all()
    until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)), 60.0, told=held)


def rank_of_a_job(rank: int, folder: Path) -> None:
    """Train in step with the others, and write down what came."""
    job = {
        "RANK": rank,
        "LOCAL_RANK": rank,
        "WORLD_SIZE": RANKS,
        "LOCAL_WORLD_SIZE": RANKS,
        "MASTER_PORT": os.getppid(),
    }
    os.environ |= {name: str(value) for name, value in job.items()} | {"MASTER_ADDR": "127.0.0.1"}
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=RANKS)
    dataset = WhoMadeIt(320, nap_s=0.002)
    sampler: Any = DistributedSampler(dataset, RANKS, rank, shuffle=False)
    indices = []
    with DpexDataLoader(dataset, batch_size=4, sampler=sampler, num_workers="auto") as loader:
        for batch in loader:
            indices += batch[:, 0].tolist()
            dist.all_reduce(torch.ones(1))
        deaths = loader.stats().deaths
    dist.destroy_process_group()
    (folder / f"{rank}.json").write_text(json.dumps({"indices": indices, "deaths": deaths}))


@pytest.mark.long
def test_eight_ranks_on_one_machine_get_all_samples_once(tmp_path: Path) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["dpex", "torch.distributed"])
    ranks = [context.Process(target=rank_of_a_job, args=(rank, tmp_path)) for rank in range(RANKS)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join(200)
    assert [each.exitcode for each in ranks] == [0] * RANKS
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(RANKS)]
    assert [one["indices"] for one in found] == [list(range(rank, 320, RANKS)) for rank in range(RANKS)]
    assert [one["deaths"] for one in found] == [0] * RANKS


FLAT = [
    Look(batches=100 * at, memory_mb=300.0 + at % 3, descriptors=20.0, threads=2.0, processes=1.0) for at in range(40)
]


@pytest.mark.parametrize("name", ALLOWED)
def test_the_soak_finds_what_rises(name: str) -> None:
    step = 3 * ALLOWED[name] / len(FLAT)
    assert report(FLAT)
    assert not report([replace(each, **{name: getattr(each, name) + step * at}) for at, each in enumerate(FLAT)])


@pytest.mark.long
def test_a_short_soak_is_flat() -> None:
    """In a process of its own, whose memory is nobody else's."""
    done = ran("-m", "benchmarks.soak", "--batches", 60000, "--resize-every", 80, timeout=200)
    assert "0 deaths" in done.stdout
