"""Train a small network on handwritten digits through DpexDataLoader: here, then on a private Ray.

    python examples/demo.py

Three runs train the same network from the same start on scikit-learn's 1,797 digits, each picture turned,
stretched, shifted and smudged anew every time: with PyTorch's DataLoader, with DpexDataLoader and worker
processes of this machine (their number changed in the middle of the second epoch), and with DpexDataLoader
and workers on Ray. The two dpex runs must see the same batches, bit for bit.
"""

import argparse
import hashlib
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import cv2
import numpy as np
import torch
from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dpex import DpexDataLoader
from pictures import Digits, Picture

BATCH = 64


class AugmentedDigits(Dataset[Picture]):
    """Each digit `repeats` times, redrawn every time. Sample: float32 (1, 28, 28), class."""

    def __init__(self, digits: Digits, repeats: int) -> None:
        self.digits = digits
        self.repeats = repeats

    def __len__(self) -> int:
        return len(self.digits) * self.repeats

    def __getitem__(self, index: int) -> Picture:
        cv2.setNumThreads(0)
        image, label = self.digits[index % len(self.digits)]
        return torch.from_numpy(smudged(warped(image[0].numpy())))[None], label


def warped(image: np.ndarray) -> np.ndarray:
    """Turned by up to 12 degrees, scaled by up to 12 %, shifted by up to 2 pixels."""
    turn = cv2.getRotationMatrix2D((14, 14), random.uniform(-12, 12), random.uniform(0.88, 1.12))
    turn[:, 2] += random.uniform(-2, 2), random.uniform(-2, 2)
    return cv2.warpAffine(image, turn, (28, 28))


def smudged(image: np.ndarray, strength: float = 4.0) -> np.ndarray:
    """Bent by a smooth random field (Simard, Steinkraus and Platt, 2003) and given a little noise."""
    fields = np.random.uniform(-1, 1, (28, 28, 2)).astype(np.float32)
    bend = cv2.GaussianBlur(fields, (0, 0), 4) * strength * 4
    rows, columns = np.mgrid[:28, :28].astype(np.float32)
    bent = cv2.remap(image, columns + bend[..., 0], rows + bend[..., 1], cv2.INTER_LINEAR)
    return bent + np.random.normal(0, 0.05, bent.shape).astype(np.float32)


def small_network() -> nn.Module:
    """Two convolution blocks and a linear layer; the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 7 * 7, 10)),
    )


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one run came to.

    accuracy_ratio: share of the test digits named rightly. training_per_s: samples per second while
    training, after the first epoch. loading_per_s: the same with nothing but the loader at work.
    waiting_ratio: share of the training time spent in `next()`. digest: of all batches trained on, in
    order.
    """

    name: str
    accuracy_ratio: float
    training_per_s: float
    loading_per_s: float
    waiting_ratio: float
    digest: str


class Watch:
    """Passes over a loader, timed. `samples`, `wait_s` (in `next()`) and `total_s` add up over the passes."""

    def __init__(self) -> None:
        self.samples = 0
        self.wait_s = self.total_s = 0.0

    def batches(self, loader: DataLoader[Picture]) -> Iterator[list[torch.Tensor]]:
        """One pass."""
        start_s = time.perf_counter()
        source = iter(loader)
        while True:
            asked_s = time.perf_counter()
            batch = next(source, None)
            self.wait_s += time.perf_counter() - asked_s
            if batch is None:
                break
            self.samples += len(batch[1])
            yield batch
        self.total_s += time.perf_counter() - start_s


class Trainer:
    """A network and its optimiser, from the same start each time."""

    def __init__(self) -> None:
        self.model = small_network()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.003)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        self.model.train()
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def accuracy_ratio(self, digits: Digits) -> float:
        self.model.eval()
        scores = self.model(torch.from_numpy(digits.images)[:, None])
        return float((scores.argmax(1) == torch.tensor(digits.labels)).float().mean())


def train(
    name: str,
    loader: DataLoader[Picture],
    epochs: int,
    progress: Progress,
    half_way: Callable[[], None] = lambda: None,
) -> Run:
    """Train through `loader`, with a bar; `half_way` is called in the middle of the second epoch."""
    trainer, sha = Trainer(), hashlib.sha256()
    first, later, alone = Watch(), Watch(), Watch()
    bar = progress.add_task(name, total=epochs * len(loader))
    for epoch in range(epochs):
        for number, (images, labels) in enumerate((later if epoch else first).batches(loader)):
            trainer.step(images, labels)
            for tensor in (images, labels):
                sha.update(tensor.numpy())
            if (epoch, number) == (1, len(loader) // 2):
                half_way()
            progress.advance(bar)
    for _ in alone.batches(loader):
        pass
    return Run(
        name=name,
        accuracy_ratio=trainer.accuracy_ratio(Digits(train=False)),
        training_per_s=later.samples / later.total_s,
        loading_per_s=alone.samples / alone.total_s,
        waiting_ratio=later.wait_s / later.total_s,
        digest=sha.hexdigest(),
    )


def runs(options: argparse.Namespace, progress: Progress) -> list[Run]:
    """torch's DataLoader, dpex here, dpex on Ray."""
    dataset = AugmentedDigits(Digits(train=True), options.repeats)
    workers = options.num_workers

    def same() -> dict[str, Any]:
        batches = {"batch_size": BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(0)}
        return batches | {"num_workers": workers, "persistent_workers": True}

    results = [train("PyTorch's DataLoader", DataLoader(dataset, **same()), options.epochs, progress)]
    with DpexDataLoader(dataset, **same(), seeding="batch") as here:
        grow = partial(here.resize, local=workers + 1)
        name = f"dpex, {workers} then {workers + 1} workers here"
        results.append(train(name, here, options.epochs, progress, grow))
    with DpexDataLoader(
        dataset, **same(), seeding="batch", distribute_mode=True, head_address=options.head_address
    ) as remote:
        results.append(train(f"dpex, {workers} workers on Ray", remote, options.epochs, progress))
    return results


def table_of(results: list[Run]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    table.add_column("loader", no_wrap=True)
    for heading in ("accuracy\non test", "samples/s\ntraining", "samples/s\nloading only", "time\nwaiting"):
        table.add_column(heading, justify="right", no_wrap=True)
    for run in results:
        figures = f"{run.training_per_s:,.0f}", f"{run.loading_per_s:,.0f}"
        table.add_row(run.name, f"{run.accuracy_ratio:.1%}", *figures, f"{run.waiting_ratio:.1%}")
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=5, help="at least 2 (5)")
    parser.add_argument("--repeats", type=int, default=4, help="times each digit comes in an epoch (4)")
    parser.add_argument("--num-workers", type=int, default=2)
    parser.add_argument("--head-address", default="local", help="Ray: local (a private one), auto, host:port")
    return parser.parse_args()


def main() -> int:
    """0 if both dpex runs saw the same batches."""
    options, console = parse(), Console()
    console.print("[bold]dpex[/bold]: training on handwritten digits, redrawn at every turn\n")
    columns = (
        *(SpinnerColumn(finished_text="[green]✓"), TextColumn("{task.description}"), BarColumn()),
        *(MofNCompleteColumn(), TextColumn("batches"), TimeElapsedColumn()),
    )
    with Progress(*columns, console=console) as progress:
        results = runs(options, progress)
    console.print(table_of(results))
    _, here, remote = results
    same = here.digest == remote.digest
    mark, word = ("[green]✓", "the same batches") if same else ("[red]✗", "DIFFERENT batches")
    console.print(f"{mark}[/] here and on Ray, training saw {word}, bit for bit")
    console.print(f"  sha256 {here.digest[:32]}… here\n  sha256 {remote.digest[:32]}… on Ray")
    return 0 if same else 1


if __name__ == "__main__":
    sys.exit(main())
