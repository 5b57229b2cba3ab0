"""See dpex at work: a network is trained on JPEG files while num_workers="auto" finds the workers that it needs.

    python examples/demo.py                # a minute and a half, on two CPU cores or more
    python examples/demo.py --stay         # keep the live page up afterwards

1. PyTorch's DataLoader with two workers, for comparison: training waits for data most of the time.
2. DpexDataLoader with num_workers="auto", from a cold start: the wait falls, each decision is printed as it is taken,
   and a live page shows the run.
3. Two workers on a private Ray. They make the same batches, which a checksum proves.
4. The loader is asked why training waits, and gets more workers while the epoch goes on.

The files, their decoding, the network and its training are real. The distance of the storage is a sleep.
"""

import argparse
import hashlib
import importlib
import logging
import os
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain, pairwise
from pathlib import Path
from threading import Event
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from dpex import DpexDataLoader
from dpex.options import ClusterConfig
from figures import conclusion, look, others_cpus, warning
from pictures import PHOTOGRAPHS, Tiles, write_tiles
from show import Display, Stretch, Watch, total

BATCH = 32
FIXED_WORKERS = 2
STORAGE_S = 0.01
"""How much longer opening a file takes than on the disk of this machine."""
REPEATS = 24
"""How often each file comes in an epoch, each time with another crop."""
SECONDS = {"torch": 6.0, "auto": 26.0, "ray": 10.0, "resized": 16.0}
"""Of training, in each part."""
ENOUGH_BATCHES = 55
"""A diagnosis needs fifty; a part that is to be diagnosed takes up to twice its time for them."""
SETTLED = 5
"""Lines at the end of a part that show how it goes once the tuner has settled."""


def network(classes: int) -> nn.Module:
    """Return three convolutions, each of which halves the picture; float32 (N, 3, 64, 64) to (N, classes) scores."""
    channels, layers = (3, 24, 48, 96), []
    for before, after in pairwise(channels):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(4 * channels[-1], classes))


class Trainer:
    """The network and its optimizer, with the same initial weights each time."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = network(len(PHOTOGRAPHS))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.002)

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Learn from one batch."""
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    @torch.no_grad()
    def accuracy_ratio(self, tiles: Tiles) -> float:
        """Return the share of these tiles that are named correctly, 0 to 1."""
        self.model.eval()
        right = [self.model(images).argmax(1) == labels for images, labels in DataLoader(tiles, batch_size=BATCH)]
        self.model.train()
        return float(torch.cat(right).float().mean())


class Training:
    """A network that is trained through one loader, and the checksum of all batches up to each one.

    Nothing is measured before the first batch is there; how long that took is printed.
    """

    def __init__(self, display: Display, loader: Any, busy: str) -> None:
        self.watch = Watch(display, loader)
        self.trainer = Trainer()
        self.checksums: list[str] = []
        self._sha256 = hashlib.sha256()
        start_s = time.monotonic()
        with display.busy(busy):
            epoch = iter(loader)
            first = next(epoch)
        display.paragraph(f"The first batch arrived after {time.monotonic() - start_s:.1f} s.")
        self._batches = chain([first], epoch, self._further_epochs(loader))

    def run(self, seconds: float, batches: int = 0) -> Stretch:
        """Train for so long, or up to twice as long for that many batches, and return what was measured."""
        known, least = len(self.watch.seconds), len(self.checksums) + batches
        end_s = time.monotonic() + seconds
        for images, labels in self.watch.batches(self._batches):
            self.trainer.step(images, labels)
            self._add(images, labels)
            late_s = time.monotonic() - end_s
            if late_s > seconds or (late_s > 0 and len(self.checksums) >= least):
                break
        return total(self.watch.seconds[known:])

    def _add(self, *tensors: torch.Tensor) -> None:
        for tensor in tensors:
            self._sha256.update(tensor.numpy())
        self.checksums.append(self._sha256.hexdigest())

    @staticmethod
    def _further_epochs(loader: Any) -> Iterator[list[torch.Tensor]]:
        while True:
            yield from loader


class Demo:
    """The parts of the demo, in their order. `seconds`: of training in each, by name."""

    def __init__(self, display: Display, folder: Path, seconds: dict[str, float]) -> None:
        self.display = display
        self.seconds = seconds
        self.began = look()
        train, test = write_tiles(folder)
        self.train_tiles = Tiles(train, repeats=REPEATS, storage_s=STORAGE_S)
        self.test_tiles = Tiles(test, is_augmented=False)
        self.rows: list[tuple[str, Stretch]] = []
        self.found_workers = FIXED_WORKERS
        self.checksums: list[str] = []
        self.others: list[float | None] = []

    def settings(self) -> dict[str, Any]:
        """Return what all loaders are given."""
        generator = torch.Generator().manual_seed(0)
        return {"batch_size": BATCH, "shuffle": True, "generator": generator, "persistent_workers": True}

    def introduce(self) -> None:
        """Say what dpex is for, and what is trained on what."""
        tiles, weights = self.train_tiles, sum(one.numel() for one in network(len(PHOTOGRAPHS)).parameters())
        self.display.paragraph(
            "While a training loop waits for its next batch, the GPU has nothing to do. dpex replaces PyTorch's "
            'DataLoader: with num_workers="auto" it measures the loop and sets the workers while training runs.'
        )
        self.display.heading("What is trained here")
        self.display.facts(
            {
                "task": "Name the photograph, one of ten, that a small tile was cut from.",
                "data": f"{len(tiles.files)} JPEG files to train on, {len(self.test_tiles.files)} to test with. Each "
                "is decoded, cropped and resized at random, flipped and normalised.",
                "network": f"A convolutional network with {weights:,} weights, trained on one CPU.",
                "storage": f"A sleep of {STORAGE_S * 1e3:.0f} ms before each file is opened stands for distant "
                "storage. Everything else is real.",
            }
        )
        if said := warning(others_cpus(self.began, look()), cpus()):
            self.display.result(False, said)

    def measure(self, training: Training, part: str) -> Stretch:
        """Train for the time of that part, and note how many CPUs other programs kept busy meanwhile."""
        before = look()
        measured = training.run(self.seconds[part])
        self.others.append(others_cpus(before, look()))
        return measured

    def with_torch(self) -> None:
        """Train with PyTorch's loader, for comparison."""
        self.display.heading(f"1. PyTorch's DataLoader, num_workers={FIXED_WORKERS}")
        self.display.paragraph(
            "Each line is a second of training. The bar is the wait: the share of that second in which the loop was "
            "blocked because the next batch was not ready."
        )
        loader = DataLoader(self.train_tiles, **self.settings(), num_workers=FIXED_WORKERS)
        training = Training(self.display, loader, "Starting the workers ...")
        self.rows.append((f"PyTorch's DataLoader, {FIXED_WORKERS} workers", self.measure(training, "torch")))

    def with_auto(self) -> DpexDataLoader[Any]:
        """Train with a tuned loader, which is returned open so that its live page stays."""
        self.display.heading('2. DpexDataLoader, num_workers="auto", from a cold start')
        self.display.paragraph(
            "The same loop with another loader. dpex measures what a batch and a training step cost. It changes the "
            "number of workers and the prefetch (how many batches are drawn ahead), but never the batches."
        )
        loader = DpexDataLoader(self.train_tiles, **self.settings(), num_workers="auto", metrics_port=0, name="train")
        training = Training(self.display, loader, "Starting the workers ...")
        self.show_page(loader)
        self.rows.append(('DpexDataLoader, num_workers="auto"', self.measure(training, "auto")))
        self.rows.append((f"  its last {SETTLED} seconds", total(training.watch.seconds[-SETTLED:])))
        accuracy_ratio = training.trainer.accuracy_ratio(self.test_tiles)
        self.display.paragraph(
            f"The network now names {accuracy_ratio:.0%} of the tiles that it was not trained on; guessing would name "
            f"{1 / len(PHOTOGRAPHS):.0%}."
        )
        self.found_workers, self.checksums = training.watch.workers, training.checksums
        return loader

    def show_page(self, loader: DpexDataLoader[Any]) -> None:
        """Say where the live page is, and fetch it once to see that it answers."""
        with urllib.request.urlopen(str(loader.metrics_url), timeout=10) as answer:
            status, page = answer.status, answer.read()
        self.display.paragraph(
            f"The live page of this run is {loader.metrics_url} until the demo ends. It answered just now with status "
            f"{status} and {len(page) / 1e3:.0f} kB. Open it in a browser on this machine, or run `dpex top` in "
            "another terminal."
        )

    def with_ray(self) -> bool:
        """Train with workers on Ray, ask for a diagnosis and act on it. Return whether the batches were the same."""
        where, place = self.other_place()
        with DpexDataLoader(self.train_tiles, **self.settings(), num_workers=FIXED_WORKERS, **where) as loader:
            with quiet():
                training = Training(self.display, loader, f"Starting workers {place} ...")
            loader.diagnose(reset=True)  # how long the workers took to start is not the question
            measured = training.run(self.seconds["ray"], ENOUGH_BATCHES)
            self.rows.append((f"DpexDataLoader, {FIXED_WORKERS} workers {place}", measured))
            same = self.check(training.checksums)
            self.diagnose(loader)
            self.grow(loader, self.found_workers, is_remote=place == "on Ray")
            name = f"DpexDataLoader, {self.found_workers} workers {place}"
            self.rows.append((name, training.run(self.seconds["resized"])))
            return self.check(training.checksums) and same

    def other_place(self) -> tuple[dict[str, Any], str]:
        """Return the loader's arguments for workers on Ray, or none where Ray is missing, and the place in words."""
        if not has_ray():
            self.display.heading(f"3. DpexDataLoader, {FIXED_WORKERS} workers")
            self.display.paragraph(
                "Ray is not installed, so this part runs without it: pip install 'dpex[ray]' adds it. The workers are "
                "processes of this machine. There are only two, so training waits again; the batches are the same."
            )
            return {"name": "here", "seeding": "batch"}, "here"
        self.display.heading(f"3. DpexDataLoader, {FIXED_WORKERS} workers on Ray")
        self.display.paragraph(
            "The workers are now actors of a Ray cluster. A cluster may have many machines; this one is private and "
            "has only yours. There are only two workers, so training waits again; the batches are the same. Until the "
            "workers run, the training process makes the batches."
        )
        resources = {"num_cpus": 1 / (2 * max(FIXED_WORKERS, self.found_workers))}  # all fit on the smallest machine
        ray = {
            "distribute_mode": True,
            "head_address": "local",
            "cluster_config": ClusterConfig(ray_remote_args=resources),
        }
        return {"name": "ray", "seeding": "batch", **ray}, "on Ray"

    def check(self, checksums: list[str]) -> bool:
        """Print and return whether these batches are those that the tuned loader yielded."""
        count = min(len(checksums), len(self.checksums))
        mine, theirs = checksums[count - 1], self.checksums[count - 1]
        if mine == theirs:
            said = f"All {count} batches are those of part 2, bit for bit (SHA-256 {mine[:12]}...)."
        else:
            said = f"The first {count} batches DIFFER from those of part 2 (SHA-256 {mine} here, {theirs} there)."
        self.display.result(mine == theirs, said)
        return mine == theirs

    def diagnose(self, loader: DpexDataLoader[Any]) -> None:
        """Ask the loader why training waited."""
        self.display.heading("4. Why does training wait? print(loader.diagnose())")
        self.display.quote(str(loader.diagnose()))

    def grow(self, loader: DpexDataLoader[Any], workers: int, *, is_remote: bool) -> None:
        """Give the loader the number of workers that "auto" found."""
        name = "remote" if is_remote else "local"
        self.display.paragraph(
            f"loader.resize({name}={workers}, prefetch={2 * workers}) now gives it as many workers as part 2 found. "
            "The epoch goes on meanwhile."
        )
        loader.resize(**{name: workers, "prefetch": 2 * workers})

    def conclude(self) -> None:
        """Compare the parts, by what was measured."""
        self.display.heading("In short")
        rows = [(name, f"{one.rate:.1f}", f"{one.wait_ratio:.0%}") for name, one in self.rows]
        self.display.table(("loader", "batches/s", "wait"), rows)
        (_, torchs), _, (_, tuned), *_ = self.rows
        others = max((one for one in self.others if one is not None), default=None)
        self.display.paragraph(conclusion(torchs, FIXED_WORKERS, tuned, self.found_workers, others, cpus()))


def cpus() -> int:
    """Return how many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_ray() -> bool:
    """Return whether Ray can be imported."""
    try:
        importlib.import_module("ray")
    except ImportError:
        return False
    return True


@contextmanager
def quiet() -> Iterator[None]:
    """Leave out the remarks that Ray logs at its start; errors are still shown."""
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)


def parse() -> argparse.Namespace:
    """Return the options."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    seconds = sum(SECONDS.values())
    parser.add_argument("--seconds", type=float, default=seconds, help=f"of training in all ({seconds:.0f})")
    parser.add_argument("--stay", action="store_true", help="keep the live page up at the end, until Ctrl-C")
    return parser.parse_args()


def main() -> int:
    """Return 0 if all dpex loaders yielded the same batches, else 1."""
    options, display = parse(), Display()
    torch.set_num_threads(1)  # the other CPUs are for the workers
    factor = options.seconds / sum(SECONDS.values())
    with tempfile.TemporaryDirectory(prefix="dpex-demo-") as folder:
        demo = Demo(display, Path(folder), {part: factor * seconds for part, seconds in SECONDS.items()})
        demo.introduce()
        demo.with_torch()
        with demo.with_auto() as loader:
            same = demo.with_ray()
            demo.conclude()
            if options.stay:
                display.paragraph(f"The live page stays at {loader.metrics_url} until you press Ctrl-C.")
                Event().wait()
    return 0 if same else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
