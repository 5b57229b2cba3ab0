"""A training script whose wait can be planted: a line on its input is milliseconds to load, and milliseconds to train.

It says its port first, and ``done`` once a line has taken effect. At the end of its input it ends.
"""

import select
import sys

import torch

from dpex import DpexDataLoader
from dpex.telemetry.exporter import exporter
from tests.workload import wait_as_work


class Planted(torch.utils.data.Dataset[torch.Tensor]):
    """Takes ``load_s`` to load a sample."""

    load_s = 0.0

    def __len__(self) -> int:
        return 10**9

    def __getitem__(self, index: int) -> torch.Tensor:
        wait_as_work(self.load_s)
        return torch.zeros(1)


def main() -> None:
    data = Planted()
    with (
        DpexDataLoader(data, num_workers=0, seeding="batch", metrics_port=0, name=sys.argv[1]) as loader,
        DpexDataLoader([1, 2, 3], metrics_port=0, name="validation") as other,
    ):
        batches, train_s = iter(loader), 0.001
        list(other)
        print(exporter.port, flush=True)
        while True:
            if select.select([sys.stdin], [], [], 0)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                data.load_s, train_s = (float(word) / 1000 for word in line.split())
                print("done", flush=True)
            next(batches)
            wait_as_work(train_s)


if __name__ == "__main__":
    main()
