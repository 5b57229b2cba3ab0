"""The training of ``dpex demo``: on data that it makes itself, with ``num_workers="auto"`` and PyTorch's loader.

The files, their decoding, the network and its training are real. Only the latency of the storage is simulated, by a
sleep. This latency dominates, so the figures hardly depend on the machine.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from rich.console import Console
from rich.text import Text
from torch import nn
from torch.utils.data import DataLoader, Dataset

from dpex.cli.main import table
from dpex.system.clock import monotonic
from dpex.system.user_warnings import replace_unencodable

FIXED_WORKERS = 2
BATCH = 8
FILES, REPEATS = 512, 64
"""Number of files, and how often an epoch reads each file. Each reading has another crop."""
SIDE, CROP = 160, 128
STORAGE_S = 0.04
"""Latency of the storage for each file, in seconds. An object store has a similar latency."""
CLASSES = 4
PARTS = {"auto": 24.0, "torch": 8.0, "again": 8.0}
"""Seconds of training in each part of the demo, by name. ``--seconds`` scales all parts."""
BUSY_RATIO = 0.25
"""If other programs keep this share of the CPUs busy, the figures mean little."""
BAR = 24

Sample = tuple[torch.Tensor, int]


class StoredImages(Dataset[Sample]):
    """Compressed images in files, each read from a storage with latency, decoded, cropped and flipped.

    Sample: float32 (3, CROP, CROP) in [-1, 1], and the class, 0 to CLASSES - 1.
    """

    def __init__(self, folder: Path) -> None:
        self.paths: list[Path] = [folder / f"{number:04}.z" for number in range(FILES)]

    def write_files(self) -> None:
        """Write the files: images of stripes with noise. The class determines the width of the stripes."""
        random = np.random.default_rng(0)
        across = np.arange(SIDE)
        for number, path in enumerate(self.paths):
            stripes = 96 + 64 * np.sin(across / (2.0 + number % CLASSES) + random.random() * 6)
            image = stripes[None, :, None] + random.normal(0, 24, (SIDE, SIDE, 3))
            path.write_bytes(zlib.compress(image.clip(0, 255).astype(np.uint8).tobytes(), 1))

    def __len__(self) -> int:
        return FILES * REPEATS

    def __getitem__(self, index: int) -> Sample:
        number = index % FILES
        time.sleep(STORAGE_S)
        pixels = zlib.decompress(self.paths[number].read_bytes())
        image = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(SIDE, SIDE, 3)
        left, top, is_flipped = torch.randint(SIDE - CROP, (3,)).tolist()
        image = image[top : top + CROP, left : left + CROP]
        image = image.flip(1) if is_flipped % 2 else image
        return image.permute(2, 0, 1).to(torch.float32).div_(127.5).sub_(1.0), number % CLASSES


class Trainer:
    """A convolutional network with its optimizer. Its initial weights are always the same."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layers: list[nn.Module] = []
        for before, after in ((3, 32), (32, 64), (64, 32)):
            layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.ReLU()]
        self.model: nn.Sequential = nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(32 * 16, CLASSES)
        )
        self.optimizer: torch.optim.SGD = torch.optim.SGD(self.model.parameters(), lr=0.05)

    def train_batch(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        """Learn from one batch."""
        loss = nn.functional.cross_entropy(self.model(images), labels)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()


@dataclass(kw_only=True)
class TrainingStretch:
    """The measurements of a stretch of training: batches, seconds, and seconds in which the loop waited for a batch."""

    batches: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0

    def add(self, *, seconds: float, wait_s: float) -> None:
        self.batches += 1
        self.seconds += seconds
        self.wait_s += wait_s

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds else 0.0

    @property
    def wait_ratio(self) -> float:
        """Share of the time in which the loop waited, 0 to 1."""
        return self.wait_s / self.seconds if self.seconds else 0.0


def train(
    loader: Any, seconds: float, show: Callable[[TrainingStretch, int], None], announce: Callable[[str], None]
) -> TrainingStretch:
    """Train for ``seconds``. Call ``show`` once a second, and ``announce`` for each decision of the tuner."""
    trainer, whole, second = Trainer(), TrainingStretch(), TrainingStretch()
    batches, told = iter(loader), len(_decisions(loader))
    while whole.seconds < seconds:
        asked_s = monotonic()
        images, labels = next(batches)
        wait_s = monotonic() - asked_s
        trainer.train_batch(images, labels)
        for turn in (whole, second):
            turn.add(seconds=monotonic() - asked_s, wait_s=wait_s)
        for decision in _decisions(loader)[told:]:
            told += 1
            announce(decision.text)
        if second.seconds >= 1.0:
            show(second, workers_of(loader))
            second = TrainingStretch()
    return whole


def _decisions(loader: Any) -> Sequence[Any]:
    return getattr(loader, "decisions", ())  # PyTorch's own loader has none


def workers_of(loader: Any) -> int:
    """Return the number of workers that run now."""
    if not hasattr(loader, "stats"):  # PyTorch's own loader
        return int(loader.num_workers)
    return sum(pool.running for name, pool in loader.stats().pools.items() if name != "inline")


class Demo:
    """The parts of the demo. ``factor`` multiplies the seconds of each."""

    def __init__(self, console: Console, folder: Path, factor: float) -> None:
        self.console = console
        self.seconds: dict[str, float] = {name: seconds * factor for name, seconds in PARTS.items()}
        self.dataset: StoredImages = StoredImages(folder)
        self.rows: list[tuple[str, TrainingStretch]] = []

    def prepare(self) -> None:
        """Write the files, describe the training, and warn of a busy machine."""
        self._print_text(f"Writing {FILES} files ...")
        self.dataset.write_files()
        size = sum(path.stat().st_size for path in self.dataset.paths)
        psutil.cpu_percent()
        time.sleep(0.5)
        load = psutil.cpu_percent() / 100
        self._print_text(
            f"A small network is trained on {FILES} compressed images ({size / 1e6:.0f} MB), in batches of {BATCH}. "
            f"The storage takes {STORAGE_S * 1e3:.0f} ms for a file, as an object store does (a sleep); decoding, "
            "cropping and training are real."
        )
        if load > BUSY_RATIO:
            self._print_text(
                f"This machine is busy: other programs use {load:.0%} of its CPUs. The figures mean little until it is "
                "quiet.",
                "bold red",
            )

    def train_all(self) -> None:
        """Run all parts and print the measurements of each."""
        from dpex import AutotuneConfig, DpexDataLoader
        from dpex.diagnose import report

        self._print_heading('1. DpexDataLoader, num_workers="auto", from a cold start')
        auto: DpexDataLoader[Any]
        again: DpexDataLoader[Any]
        with DpexDataLoader(self.dataset, **self._settings(), num_workers="auto", metrics_port=0, name="demo") as auto:
            self._train(auto, "auto", 'dpex, "auto", from a cold start')
            found = auto.tuned
            self._print_heading(f"2. torch.utils.data.DataLoader, num_workers={FIXED_WORKERS}")
            torchs = DataLoader(self.dataset, **self._settings(), num_workers=FIXED_WORKERS)
            self._train(torchs, "torch", f"torch, {FIXED_WORKERS} workers")
            self._print_heading(f"3. As in another run: AutotuneConfig(start=...) with the setting found, {found}")
        config = AutotuneConfig(start=found)
        with DpexDataLoader(
            self.dataset, **self._settings(), num_workers="auto", autotune=config, name="demo"
        ) as again:
            self._train(again, "again", f'dpex, "auto", from {found}')
            self._print_conclusion(max(1, found.local))
            self._print_text(f"\n{report.text(again.diagnose(), min(report.COLUMNS, self.console.width))}\n")
        rows = [(name, f"{turn.rate:.1f}", f"{turn.wait_ratio:.0%}") for name, turn in self.rows]
        self.console.print(table(("loader", "batches/s", "wait"), rows))

    def _settings(self) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(0)
        return {"batch_size": BATCH, "shuffle": True, "generator": generator, "persistent_workers": True}

    def _train(self, loader: Any, part: str, row: str) -> None:
        self.rows.append((row, train(loader, self.seconds[part], self._print_second, self._print_decision)))

    def _print_conclusion(self, found: int) -> None:
        (_, _), (_, torchs), (_, auto) = self.rows
        ratio = auto.rate / torchs.rate if torchs.rate else 0.0
        self._print_text(
            f"\nPyTorch's loader with {FIXED_WORKERS} workers made {torchs.rate:.1f} batches/s and the loop waited for "
            f'{torchs.wait_ratio:.0%} of the time. "auto" found {found} workers: {auto.rate:.1f} batches/s '
            f"({ratio:.1f} times as many) and {auto.wait_ratio:.0%}.",
            "bold green" if ratio > 1.0 else "bold",
        )

    # -- output --------------------------------------------------------------------------------------------------------

    def _print_heading(self, text: str) -> None:
        self.console.print(f"\n[bold]{text}[/]")

    def _print_text(self, text: str, style: str = "none") -> None:
        self.console.print(Text(text, style))

    def _print_decision(self, text: str) -> None:
        self._print_text(f"  {text}", "cyan")

    def _print_second(self, turn: TrainingStretch, workers: int) -> None:
        full = round(turn.wait_ratio * BAR)
        style = "red" if turn.wait_ratio > 0.2 else "yellow" if turn.wait_ratio > 0.05 else "green"
        line = Text("  wait ").append("█" * full, style).append("·" * (BAR - full))
        self.console.print(
            line.append(f" {turn.wait_ratio:4.0%}  {turn.rate:5.1f} batches/s  {workers:2} workers"), no_wrap=True
        )


def run_demo(options: argparse.Namespace) -> int:
    """Run the demo; return 0, or 130 after Ctrl-C."""
    replace_unencodable(sys.stdout)
    console = Console(highlight=False)
    torch.set_num_threads(1)  # the other CPUs are for the workers
    try:
        with tempfile.TemporaryDirectory(prefix="dpex-demo-") as folder:
            shown = Demo(console, Path(folder), options.seconds / sum(PARTS.values()))
            shown.prepare()
            shown.train_all()
            return 0
    except KeyboardInterrupt:
        console.print("Stopped.")
        return 130
