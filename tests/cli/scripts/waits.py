"""A plain training loop, as slow as it is told to be: ``waits.py WORKERS SLEEP_S CPU_S STEP_S [BATCHES] [KIND]``."""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset


def compute(seconds):
    end = time.thread_time() + seconds
    while time.thread_time() < end:
        pass


class Samples(Dataset):
    def __init__(self, size, sleep_s, cpu_s):
        self.size, self.sleep_s, self.cpu_s = size, sleep_s, cpu_s
        self.transform = self.prepared

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        if self.sleep_s:
            time.sleep(self.sleep_s)
        return self.transform(torch.full((3,), float(index)))

    def prepared(self, sample):
        compute(self.cpu_s)
        return sample


class Stream(Samples, IterableDataset):
    def __iter__(self):
        return map(self.__getitem__, range(self.size))


def main(workers, sleep_s, cpu_s, step_s, batches="60", kind="Samples"):
    dataset = globals()[kind](2 * int(batches), float(sleep_s), float(cpu_s))
    context = "spawn" if int(workers) else None
    options = {"multiprocessing_context": context, "persistent_workers": True} if kind == "Spawned" else {}
    total = 0.0
    for batch in DataLoader(dataset, 2, num_workers=int(workers), **options):
        total += float(batch.sum())
        time.sleep(float(step_s))
    print("total", total)


class Spawned(Samples):
    """Its loader's workers are spawned."""


if __name__ == "__main__":
    main(*sys.argv[1:])
