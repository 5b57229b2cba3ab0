"""DistributedDataParallel on CPUs, two ranks: started by a launcher, or with torch.multiprocessing's spawn."""

import gc
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

PATIENCE_S = 60.0
"""Nothing takes a tenth of that but on a machine that has much else to do."""


class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return index, torch.full((3,), float(index)) + torch.rand(())


def train(rank, address):
    torch.manual_seed(rank)
    torch.set_num_threads(1)
    if address is None:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Linear(3, 1))
    sampler = DistributedSampler(Numbers())
    # In spawned ranks workers would be spawned too, and each would import torch's compiler with this file.
    loader = DataLoader(Numbers(), batch_size=4, sampler=sampler, num_workers=2, multiprocessing_context="fork")
    counts = torch.zeros(32)
    total = torch.zeros(())
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for numbers, rows in loader:
            model(rows).mean().backward()
            counts[numbers] += 1
            total += rows.sum()
    dist.all_reduce(counts)
    totals = [torch.zeros(()) for _ in range(2)]
    dist.all_gather(totals, total)
    iterators = [None, None]
    dist.all_gather_object(iterators, type(iter(loader)).__module__)
    if dist.get_rank() == 0:
        print("counts", counts.unique().tolist(), "totals", [float(value) for value in totals], "by", *iterators)
    del model
    gc.collect()
    dist.destroy_process_group()
    let_gloo_come_to_rest()


def let_gloo_come_to_rest():
    """Return once no thread of gloo's is at work any more.

    Where there was a DistributedDataParallel, these threads outlive the process group, with or without dpex. One that
    lets go of the tensors of the last collective call only as the interpreter ends, as it did not run for a while,
    aborts the process: "terminate called without an active exception".
    """
    deadline = time.monotonic() + PATIENCE_S
    while at_work := [str(task) for task in Path("/proc/self/task").iterdir() if is_at_work(task)]:
        if time.monotonic() > deadline:
            raise TimeoutError(f"threads of gloo's are still at work after {PATIENCE_S} s: {at_work}")
        time.sleep(0.01)  # and let it have the interpreter, if it is that it waits for


def is_at_work(task):
    try:
        name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
    except OSError:
        return False  # it has ended
    return name.startswith("pt_gloo") and rest.split()[0] != "S"


if __name__ == "__main__":
    if "RANK" in os.environ:
        train(int(os.environ["RANK"]), None)
    else:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True)  # finds a free port
        address = f"tcp://127.0.0.1:{store.port}"
        del store
        mp.spawn(train, (address,), nprocs=2)
