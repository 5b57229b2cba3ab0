"""Ingest of JPEG files in a training worker of Ray Train, without training: PyTorch's loader, dpex, Ray Data.

The case is that of Ray's release test (ray-project/ray#52598): a folder with a subfolder per class, a dataset that
opens a file when a sample is asked for, and a loop that takes batches and does nothing with them. The files are the
photographs of `benchmarks.works.jpeg`; all three loaders decode, crop and normalise with the same function. Ray has a
CPU for the training worker and one task of Ray Data for each CPU of the machine.

The seconds to the first batch count from the loader's constructor; images/s are those of a whole epoch, start included.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import ray
import ray.data
import torch
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchTrainer
from torch.utils.data import DataLoader, Dataset

from benchmarks.tables import data_file
from benchmarks.works.jpeg import encoded_photographs, prepared

FILES, CLASSES, BATCH = 6_000, 10, 32


class ImageFolder(Dataset[tuple[torch.Tensor, int]]):
    """The files below a folder. Sample: float32 of shape (3, 224, 224), the number of the file's subfolder."""

    def __init__(self, folder: Path) -> None:
        self.paths = sorted(str(path) for path in folder.glob("*/*.jpg"))

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path = Path(self.paths[index])
        return prepared(np.frombuffer(path.read_bytes(), np.uint8)), int(path.parent.name)


def folder_of_files() -> Path:
    """Write the photographs into a subfolder per class, if they are missing; return the folder."""
    folder = data_file("ray-ingest")
    photographs = encoded_photographs()
    for number in range(FILES):
        path = folder / str(number % CLASSES) / f"{number:06d}.jpg"
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(photographs[number % len(photographs)].tobytes())
    return folder


def with_torch(folder: Path) -> Iterable[Any]:
    """PyTorch's loader with as many workers as CPUs."""
    return DataLoader(ImageFolder(folder), batch_size=BATCH, shuffle=True, num_workers=os.cpu_count() or 1)


def with_dpex(folder: Path) -> Iterable[Any]:
    """dpex, which finds the number of workers."""
    from dpex import DpexDataLoader

    return DpexDataLoader(ImageFolder(folder), batch_size=BATCH, shuffle=True, num_workers="auto")


def with_ray_data(folder: Path) -> Iterable[Any]:
    """Ray Data: files are read and mapped by tasks. Its shuffling of the files is left out, which spares it work."""

    def sample(row: dict[str, Any]) -> dict[str, Any]:
        image = prepared(np.frombuffer(row["bytes"], np.uint8))
        return {"image": image.numpy(), "label": int(Path(row["path"]).parent.name)}

    ray.data.DataContext.get_current().enable_progress_bars = False
    rows = ray.data.read_binary_files(str(folder), include_paths=True, file_extensions=["jpg"]).map(sample)
    return rows.iter_torch_batches(batch_size=BATCH)


LOADERS: dict[str, Callable[[Path], Iterable[Any]]] = {
    "torch, workers = CPUs": with_torch,
    'dpex, "auto"': with_dpex,
    "Ray Data": with_ray_data,
}


def ingest(config: dict[str, Any]) -> None:
    """Take an epoch in a training worker, and write the seconds to the first batch and images/s to a file."""
    start_s, first_s, images = time.monotonic(), 0.0, 0
    for batch in LOADERS[config["loader"]](Path(config["folder"])):
        first_s = first_s or time.monotonic() - start_s
        images += len(batch["label"] if isinstance(batch, dict) else batch[1])
    if images != FILES:
        raise RuntimeError(f"{config['loader']} delivered {images} of {FILES} images")
    Path(config["result"]).write_text(json.dumps([first_s, images / (time.monotonic() - start_s)]))


def measured(loader: str, folder: Path) -> tuple[float, float]:
    """Return the seconds to the first batch and images/s of one epoch, in a training worker of its own."""
    with tempfile.TemporaryDirectory() as storage:
        result = Path(storage) / "result.json"
        TorchTrainer(
            ingest,
            train_loop_config={"loader": loader, "folder": str(folder), "result": str(result)},
            scaling_config=ScalingConfig(num_workers=1),
            run_config=RunConfig(storage_path=storage),
        ).fit()
        first_s, images_per_s = json.loads(result.read_text())
    return first_s, images_per_s


def main() -> None:
    """Print a table of medians over rounds in which the loaders take turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.others.ray_ingest", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    folder = folder_of_files()
    ray.init(
        address="local",
        num_cpus=(os.cpu_count() or 1) + 1,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    runs = [{name: measured(name, folder) for name in LOADERS} for _ in range(rounds)]
    print("| loader | first batch | images/s, whole epoch |\n| --- | --- | --- |")
    for name in LOADERS:
        first_s, rates = zip(*(run[name] for run in runs), strict=True)
        print(f"| {name} | {median(first_s):.2f} s | {median(rates):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) |")


if __name__ == "__main__":
    main()
