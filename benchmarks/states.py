"""`python -m benchmarks.states`: what asking for a state after each step costs, beside torchdata's StatefulDataLoader.

The dataset has a state of so many bytes, as a buffer that it shuffles in (VeOmni has one). Two workers read it, and
each step takes 10 ms. Milliseconds are those of a step, with the state and without.
"""

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from dpex import DpexDataLoader

STEP_S = 0.01


class Stream(IterableDataset[torch.Tensor]):
    """Small samples, and a state of ``state_bytes``."""

    def __init__(self, length: int, state_bytes: int) -> None:
        self.length, self.at, self.buffer = length, 0, torch.zeros(state_bytes, dtype=torch.uint8)

    def __iter__(self) -> Iterator[torch.Tensor]:
        info: Any = get_worker_info()
        for number in range(info.id, self.length, info.num_workers):
            self.at = number
            yield torch.zeros(256)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at, "buffer": self.buffer.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at, self.buffer = state["at"], state["buffer"]


def step_ms(loader: Any, steps: int, *, asks: bool) -> float:
    """Return the mean time of a step, the first ten left out."""
    if asks:
        loader.state_dict()
    began = 0.0
    for number, _ in enumerate(loader):
        if number == 10:
            began = time.perf_counter()
        time.sleep(STEP_S)
        if asks:
            loader.state_dict()
        if number == steps + 9:
            return 1e3 * (time.perf_counter() - began) / steps
    raise SystemExit("the data ended before")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.states", description=__doc__)
    parser.add_argument(
        "--megabytes", type=float, nargs="+", default=[0.0, 10.0], help="of the dataset's state (0, 10)"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps that are timed (100)")
    options = parser.parse_args()
    for megabytes in options.megabytes:
        for kind in (DpexDataLoader, StatefulDataLoader):
            loaders = [kind(Stream(8 * (options.steps + 40), int(1e6 * megabytes)), 8, num_workers=2) for _ in range(2)]
            without, asked = (step_ms(one, options.steps, asks=asks) for one, asks in zip(loaders, (0, 1), strict=True))
            print(
                f"{kind.__name__:20} state of {megabytes:5.1f} MB: {without:7.2f} ms a step, {asked:7.2f} with a state"
            )


if __name__ == "__main__":
    main()
