"""A plain PyTorch script for `benchmarks.unmodified`: knows nothing of dpex, and says what its loop saw.

Arguments: seconds a sample waits, CPU seconds it takes, seconds of a step, workers, seconds to run. Prints batches per
second and the share of the time inside ``next()``, both of the second half.
"""

import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

wait_s, cpu_s, step_s, workers, seconds = map(float, sys.argv[1:6])


class Samples(Dataset):
    def __len__(self):
        return 1 << 20

    def __getitem__(self, index):
        if wait_s:
            time.sleep(wait_s)
        until = time.thread_time() + cpu_s
        while time.thread_time() < until:
            pass
        return torch.zeros(64)


if __name__ == "__main__":
    began = asked = time.perf_counter()
    waited, half = 0.0, None
    for number, _ in enumerate(DataLoader(Samples(), 8, num_workers=int(workers)), 1):
        waited += time.perf_counter() - asked
        time.sleep(step_s)
        asked = time.perf_counter()
        if half is None and asked - began > seconds / 2:
            half = asked, waited, number
        if asked - began > seconds:
            break
    print((number - half[2]) / (asked - half[0]), (waited - half[1]) / (asked - half[0]))
