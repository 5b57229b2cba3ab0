"""An epoch that is gone on with by another number of ranks: each sample is trained on once."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import kept
from torch.utils.data import Dataset, DistributedSampler
from trainers import Forker

from dpex import DpexDataLoader, ElasticDistributedSampler, StateError, batch_seed

SIZE = 48
GLOBAL = 12
"""Samples of all ranks in a step; the number of samples is no multiple of it in some tests."""


class Noisy(Dataset[Any]):
    """A sample's augmentation depends on the step and the sample, not on who has it."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, np.random.default_rng((batch_seed(), index)).random()


def ranks(kind: Any, world: int, *, batch: int | None = None, size: int = SIZE) -> list[DpexDataLoader[Any]]:
    dataset = Noisy(size)
    samplers = [kind(dataset, world, rank, seed=5) for rank in range(world)]
    each = GLOBAL // world if batch is None else batch
    return [DpexDataLoader(dataset, batch_size=each, sampler=sampler, seeding="batch") for sampler in samplers]


def steps(loaders: list[DpexDataLoader[Any]], most: int | None = None) -> Iterator[list[tuple[int, float]]]:
    """What all ranks together are given, step by step, with the same base seed on each."""
    iterators = []
    for loader in loaders:
        torch.manual_seed(7)
        iterators.append(iter(loader))
    for _ in range(most if most is not None else SIZE):
        batches = [batch for iterator in iterators if (batch := next(iterator, None)) is not None]
        if not batches:
            return
        yield sorted(pair for batch in batches for pair in zip(*(part.tolist() for part in batch), strict=True))


@pytest.mark.parametrize("kind", [DistributedSampler, ElasticDistributedSampler])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (1, 4)])
def test_with_the_global_batch_kept_the_steps_that_follow_are_the_same(kind: Any, before: int, after: int) -> None:
    whole = list(steps(ranks(kind, before)))
    first = ranks(kind, before)
    begun = list(steps(first, 2))
    state = kept(first[-1].state_dict())
    later = ranks(kind, after)
    for loader in later:
        loader.load_state_dict(state)
    assert begun + list(steps(later)) == whole
    assert sorted(index for step in whole for index, _ in step) == list(range(SIZE))


@pytest.mark.parametrize("cuts", [((2, 5, 3), (3, 2, 2), (1, 4, None)), ((3, 4, 1), (2, 3, 4), (5, 1, None))])
def test_an_elastic_sampler_needs_no_global_batch(cuts: tuple[tuple[int, int, int | None], ...]) -> None:
    """Each run is of so many ranks, with that batch size, for so many steps; 47 samples divide by none of them."""
    seen: list[int] = []
    state: Any = None
    for world, batch, most in cuts:
        loaders = ranks(ElasticDistributedSampler, world, batch=batch, size=47)
        for loader in loaders:
            loader.load_state_dict(state or {})
        seen += [index for step in steps(loaders, most) for index, _ in step]
        state = kept(loaders[0].state_dict())
    assert sorted(seen) == list(range(47))


def test_an_elastic_sampler_goes_on_far_into_an_epoch_and_begins_the_next_one_anew() -> None:
    (loader,) = ranks(ElasticDistributedSampler, 1, batch=1)
    iterator = iter(loader)
    seen = [next(iterator)[0].item() for _ in range(40)]
    (later,) = ranks(ElasticDistributedSampler, 1, batch=2)
    later.load_state_dict(loader.state_dict())
    seen += [index for batch in later for index in batch[0].tolist()]
    assert sorted(seen) == list(range(SIZE))
    assert len(list(later)) == len(later) == SIZE // 2


def test_dropping_the_last_makes_ranks_equal() -> None:
    samplers = [ElasticDistributedSampler(range(11), 3, rank, shuffle=False, drop_last=True) for rank in range(3)]
    assert [list(sampler) for sampler in samplers] == [[0, 3, 6], [1, 4, 7], [2, 5, 8]]
    assert {len(sampler) for sampler in samplers} == {3}


def test_another_global_batch_or_seed_is_an_error_that_names_both() -> None:
    first = ranks(DistributedSampler, 2)
    list(steps(first, 1))
    state = first[0].state_dict()
    with pytest.raises(StateError, match=r"of 12 samples.*together.*have 15 together.*ElasticDistributedSampler"):
        ranks(DistributedSampler, 3, batch=5)[0].load_state_dict(state)
    with pytest.raises(StateError, match=r"of 99 samples that were taken.*has 48"):
        ElasticDistributedSampler(Noisy(), 2, 0).load_state_dict({"epoch": 0, "samples": 99})


TRAINING = """
import signal, torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from dpex import ElasticDistributedSampler

def train(path, fatal_step):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = ElasticDistributedSampler(range(50), seed=5)
    loader = DpexDataLoader(range(50), batch_size=6 // world, sampler=sampler, num_workers=1, seeding="batch")
    saved = {"trained": []}
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        loader.load_state_dict(saved["loader"])
    batches = iter(loader)
    for step in range(50):
        if step == fatal_step and rank == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        batch = next(batches, None)
        parts = [None] * world
        dist.all_gather_object(parts, [] if batch is None else batch.tolist())
        if not any(parts):
            break
        saved = {"trained": saved["trained"] + sum(parts, []), "loader": loader.state_dict()}
        if rank == 0:
            torch.save(saved, path + ".new")
            os.replace(path + ".new", path)
    loader.close()
    dist.destroy_process_group()

def torchrun(world, path, fatal_step):
    # As torchrun --standalone, but that ranks are forked.
    config = LaunchConfig(
        1, 1, world, run_id=path, rdzv_backend="c10d", rdzv_endpoint="localhost:0", start_method="fork", max_restarts=0
    )
    elastic_launch(config, train)(path, fatal_step)
"""


def test_under_torchrun_a_killed_rank_costs_no_sample(tmp_path: Path) -> None:
    """Two ranks, of which one is killed after three steps; then the same checkpoint with one rank, and with three."""
    checkpoint = tmp_path / "checkpoint.pt"
    with closing(Forker(tmp_path, TRAINING, OMP_NUM_THREADS="1")) as forker:
        code, _, told = forker.run(f"torchrun(2, {str(checkpoint)!r}, 3)")
        assert code == 1
        assert "ChildFailedError" in told
        assert "SIGKILL" in told
        trained = torch.load(checkpoint, weights_only=True)["trained"]
        assert len(trained) == 18
        for world in (1, 3):
            copy = tmp_path / f"{world}.pt"
            copy.write_bytes(checkpoint.read_bytes())
            code, _, told = forker.run(f"torchrun({world}, {str(copy)!r}, -1)")
            assert code == 0, told
            after = torch.load(copy, weights_only=True)["trained"]
            assert after[:18] == trained
            assert sorted(after) == list(range(50)), world
