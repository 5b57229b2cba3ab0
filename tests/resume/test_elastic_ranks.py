"""An epoch that is resumed by another number of ranks, with the global batch kept: each sample is trained on once."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import kept
from families import Of
from torch.utils.data import DistributedSampler
from trainers import Forker

from dpex import DpexDataLoader, StateError, batch_seed

SIZE = 48
GLOBAL = 12
"""Samples of all ranks in a step."""


def noisy_at(index: int) -> tuple[int, float]:
    """A sample's augmentation depends on the step and the sample, not on the rank that has it."""
    return index, np.random.default_rng((batch_seed(), index)).random()


def ranks(world: int, *, batch: int | None = None) -> list[DpexDataLoader[Any]]:
    dataset = Of(noisy_at, SIZE)
    samplers = [DistributedSampler(dataset, world, rank, seed=5) for rank in range(world)]
    each = GLOBAL // world if batch is None else batch
    return [DpexDataLoader(dataset, batch_size=each, sampler=sampler, seeding="batch") for sampler in samplers]


def steps(loaders: list[DpexDataLoader[Any]], most: int = SIZE) -> Iterator[list[tuple[int, float]]]:
    """What all ranks together are given, step by step, with the same base seed on each."""
    iterators = []
    for loader in loaders:
        torch.manual_seed(7)
        iterators.append(iter(loader))
    for _ in range(most):
        batches = [batch for iterator in iterators if (batch := next(iterator, None)) is not None]
        if not batches:
            return
        yield sorted(pair for batch in batches for pair in zip(*(part.tolist() for part in batch), strict=True))


@pytest.mark.parametrize(("before", "after"), [(2, 1), (2, 3), (3, 2), (1, 4)])
def test_other_ranks_resume_the_same_steps_of_one_global_batch(before: int, after: int) -> None:
    whole = list(steps(ranks(before)))
    first = ranks(before)
    begun = list(steps(first, 2))
    state = kept(first[-1].state_dict())
    later = ranks(after)
    for loader in later:
        loader.load_state_dict(state)
    assert begun + list(steps(later)) == whole
    assert sorted(index for step in whole for index, _ in step) == list(range(SIZE))


def test_another_global_batch_is_an_error_that_names_both() -> None:
    first = ranks(2)
    list(steps(first, 1))
    with pytest.raises(StateError, match=r"of 12 samples.*together.*has 15 samples"):
        ranks(3, batch=5)[0].load_state_dict(first[0].state_dict())


TRAINING = """
import signal, torch
import torch.distributed as dist
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from torch.utils.data import DistributedSampler

def train(path, fatal_step):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    sampler = DistributedSampler(range(48), seed=5)
    loader = DpexDataLoader(range(48), batch_size=6 // world, sampler=sampler, num_workers=1, seeding="batch")
    saved = {"trained": []}
    if os.path.exists(path):
        saved = torch.load(path, weights_only=True)
        loader.load_state_dict(saved["loader"])
    batches = iter(loader)
    for step in range(48):
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
        assert "ChildFailedError" in told  # of either rank: the other one fails in all_gather
        trained = torch.load(checkpoint, weights_only=True)["trained"]
        assert len(trained) == 18
        for world in (1, 3):
            copy = tmp_path / f"{world}.pt"
            copy.write_bytes(checkpoint.read_bytes())
            code, _, told = forker.run(f"torchrun({world}, {str(copy)!r}, -1)")
            assert code == 0, told
            after = torch.load(copy, weights_only=True)["trained"]
            assert after[:18] == trained
            assert sorted(after) == list(range(48)), world
