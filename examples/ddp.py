"""Use the loader with DistributedDataParallel and a DistributedSampler.

    torchrun --nproc-per-node 2 examples/ddp.py
    python examples/ddp.py --ranks 2                      # the same without a launcher

The data are 20,000 random rows of 5 floats, in batches of 100. Each rank has its own loader over its share of the rows.
After each epoch the ranks add up how often each row was seen, and rank 0 prints the result.
"""

import os
from itertools import islice

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset, DistributedSampler

from dpex import DpexDataLoader
from options import parser, workers


class NumberedRows(Dataset[tuple[int, torch.Tensor]]):
    """Random rows of 5 floats, the same in every rank, each with its number."""

    def __init__(self, length: int) -> None:
        self.rows = torch.randn(length, 5, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor]:
        return index, self.rows[index]


def train(options) -> None:
    """Train in one rank."""
    gpu = torch.cuda.is_available() and int(os.environ["LOCAL_RANK"]) < torch.cuda.device_count()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    model = DistributedDataParallel(nn.Linear(5, 2).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.001)

    dataset = NumberedRows(options.rows)
    sampler = DistributedSampler(dataset)
    loader = DpexDataLoader(dataset, batch_size=100, sampler=sampler, **workers(options))
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        seen = torch.zeros(len(dataset), dtype=torch.int32, device=device)
        first = []
        for numbers, rows in islice(loader, options.limit):
            loss = model(rows.to(device)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen[numbers] += 1
            first += numbers.tolist() if len(first) < 5 else []
        report(epoch, seen, first)
    loader.close()
    del model, optimizer  # a model that outlives its process group can abort the process at exit
    dist.barrier()
    dist.destroy_process_group()


def report(epoch: int, seen: torch.Tensor, first: list[int]) -> None:
    """Print, in rank 0, how often all ranks together saw the rows, and with which rows rank 0 began."""
    dist.all_reduce(seen)
    if dist.get_rank() == 0:
        times = ", ".join(f"{int((seen == n).sum())} rows {n} times" for n in seen.unique().tolist())
        counts = f"each of {len(seen)} rows was seen once" if bool((seen == 1).all()) else f"seen were {times}"
        print(f"epoch {epoch + 1}: {counts}; rank 0 began with rows {first[:5]}", flush=True)


def spawned(rank: int, ranks: int, port: int, options) -> None:
    """Train in a rank that was started without a launcher."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(ranks)}
    os.environ |= {"LOCAL_WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    train(options)


def main() -> None:
    """Train in this process if a launcher started it as a rank, else start the ranks."""
    arguments = parser(__doc__, num_workers=2, distribute_mode=False)
    arguments.add_argument("--rows", type=int, default=20_000, help="rows of the dataset (20000)")
    arguments.add_argument("--ranks", type=int, default=2, help="ranks started without a launcher (2)")
    options = arguments.parse_args()
    if "RANK" in os.environ:
        train(options)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # finds a free port
        port = store.port
        del store
        torch.multiprocessing.spawn(spawned, (options.ranks, port, options), nprocs=options.ranks)


if __name__ == "__main__":
    main()
