"""Four ranks in one real process group (gloo), whose loading is planted to be slow in several ways.

`test_job_of_ranks` starts it with a folder: rank *n* writes ``n.json`` there, with the verdict of each case. With
``--launched`` it is a script below torchrun, which trains once.
"""

import json
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset
from workload import wait_as_work

from dpex import DpexDataLoader

RANKS, BATCHES, STEP_S, SLOW_S = 4, 60, 0.015, 0.045
Seconds = Callable[[int, int], float]


class Case(NamedTuple):
    """Seconds of a batch and of a step, by rank and number; ``nodes``: names of the ranks' machines."""

    load_s: Seconds
    step_s: Seconds = lambda rank, number: STEP_S
    nodes: tuple[str, ...] = ("a",) * RANKS


CASES = {
    "slow disk of rank 1": Case(lambda rank, number: SLOW_S * (rank == 1)),
    "slow node": Case(lambda rank, number: SLOW_S * (rank > 1), nodes=("a", "a", "b", "b")),
    "slow step of rank 1": Case(lambda rank, number: 0.0, lambda rank, number: SLOW_S if rank == 1 else STEP_S),
    "all equal": Case(lambda rank, number: 0.0),
    "all slow": Case(lambda rank, number: SLOW_S),
    "moving": Case(lambda rank, number: RANKS * SLOW_S * (number % RANKS == rank)),
    "from the middle on": Case(lambda rank, number: SLOW_S * (rank == 3 and number >= BATCHES // 2)),
}


class Batches(Dataset[torch.Tensor]):
    """A sample is a batch, which waits as for a disk."""

    def __init__(self, load_s: Seconds, rank: int, length: int) -> None:
        self.load_s, self.rank, self.length = load_s, rank, length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(self.load_s(self.rank, index))
        return torch.zeros(8)


def train(loader: Any, case: Case, rank: int) -> None:
    """Each step ends when all ranks are there, as under DDP."""
    for number, _ in enumerate(loader):
        wait_as_work(case.step_s(rank, number))
        dist.all_reduce(torch.zeros(1))


def rank_main(folder: Path, rank: int) -> None:
    """One rank, in all cases."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=RANKS)
    found = {}
    for name, case in CASES.items():
        platform.node = lambda case=case: case.nodes[rank]
        with DpexDataLoader(Batches(case.load_s, rank, BATCHES), batch_size=1, num_workers=1) as loader:
            train(loader, case, rank)
            job = loader.diagnose(group=dist.group.WORLD)
        found[name] = {**job.to_dict(), "text": str(job), "own": loader.diagnose().verdict.cause}
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def launched() -> None:
    """Rank 2 takes 150 ms for a batch."""
    dist.init_process_group("gloo")
    case, rank = Case(lambda rank, number: 0.15 * (rank == 2)), dist.get_rank()
    train(DataLoader(Batches(case.load_s, rank, BATCHES), batch_size=1, num_workers=1), case, rank)
    dist.destroy_process_group()


def main(folder: Path) -> None:
    """Fork the ranks."""
    forks = []
    for rank in range(RANKS):
        forks.append(os.fork())
        if not forks[-1]:
            rank_main(folder, rank)
            return
    codes = [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]
    assert not any(codes), codes


if __name__ == "__main__":
    launched() if "--launched" in sys.argv else main(Path(sys.argv[1]))
