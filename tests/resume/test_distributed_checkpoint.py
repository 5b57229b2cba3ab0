"""The loader under one key of `torch.distributed.checkpoint`, in real process groups of 4 ranks and then 2 or 8."""

import importlib
import multiprocessing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch.utils.data import DistributedSampler, IterableDataset
from waiting import PATIENCE_S

from dpex import DpexDataLoader, StateError

pytestmark = pytest.mark.filterwarnings("ignore")
DATA, GLOBAL_BATCH, BEFORE = list(range(96)), 24, 2


class Stream(IterableDataset[int]):
    """Numbers, without a state of its own."""

    def __iter__(self) -> Any:
        yield from DATA


def train(folder: Path, ranks: int, rank: int, is_first: bool, told: Any) -> None:
    """One rank, as torchtitan's checkpointer has it: states by name, the loader among them."""
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting {ranks}", rank=rank, world_size=ranks)
    sampler, got = DistributedSampler(DATA, ranks, rank, seed=1), []
    with DpexDataLoader(
        DATA, GLOBAL_BATCH // ranks, sampler=sampler, num_workers=1 + is_first, seeding="batch"
    ) as loader:
        if not is_first:
            dcp.load({"dataloader": loader}, checkpoint_id=folder / "checkpoint")
        for number, batch in enumerate(loader):
            got += batch.tolist()
            if is_first and number + 1 == BEFORE:
                dcp.save({"dataloader": loader}, checkpoint_id=folder / "checkpoint")
                break
    told.put(got)
    dist.destroy_process_group()


def job(folder: Path, ranks: int, *, is_first: bool) -> list[int]:
    """Return the samples of all ranks."""
    importlib.import_module("torch.distributed.checkpoint")  # once for all ranks, and not before other tests fork
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    processes = [context.Process(target=train, args=(folder, ranks, rank, is_first, told)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(PATIENCE_S)
    assert [process.exitcode for process in processes] == [0] * ranks
    return [sample for _ in range(ranks) for sample in told.get()]


@pytest.mark.parametrize("after", [2, 8])
def test_four_ranks_go_on_as_fewer_or_more(tmp_path: Path, after: int) -> None:
    first = job(tmp_path, 4, is_first=True)
    assert len(first) == BEFORE * GLOBAL_BATCH
    assert sorted(first + job(tmp_path, after, is_first=False)) == DATA


def test_stream_of_other_ranks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stream divides itself by the number of ranks, which dpex cannot divide anew."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    with DpexDataLoader(Stream(), 4, num_workers=1) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with DpexDataLoader(Stream(), 4, num_workers=1) as loader:
        loader.load_state_dict(state)
        assert len(list(loader)) == len(DATA) // 4 - 1
        monkeypatch.setenv("WORLD_SIZE", "2")
        with pytest.raises(StateError, match=r"for 4 ranks, and the loader has .* for 2 ranks; resume"):
            loader.load_state_dict(state)
