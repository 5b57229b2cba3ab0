"""One course of a pipeline of small image files, in a process of its own, which prints a line of JSON.

A sample is a JPEG file of about 250x188 pixels that is decoded, cropped at random to 128x128 and normalised. A batch
has 64 of them, and the training step is a wait of 10 ms. The steps are those by which an article of 2021 took 39 % off
the time of a training, one after the other; then what dpex does with the pipeline as it was written at first.
"""

import json
import queue
import random
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, islice, repeat
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, default_collate

import dpex
from benchmarks.consumer import read_pages
from benchmarks.tables import Blobs, folder
from benchmarks.works.jpeg import encoded_photographs
from dpex import DpexDataLoader

FILES = 6000
BATCH = 64
SIDE = 128
STEP_S = 0.010
WORKERS = 4
MEAN = np.array([0.485, 0.456, 0.406], np.float32)
STD = np.array([0.229, 0.224, 0.225], np.float32)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A row of the table: the changes that have been made so far."""

    name: str
    loader: str = "torch"
    prefetched: bool = False
    in_memory: bool = False
    vectorised: bool = False
    one_file: bool = False
    cached: bool = False
    on_device: bool = False


STEPS = (
    Step(name="PyTorch, 4 workers"),
    Step(name="+ a thread that prefetches", prefetched=True),
    Step(name="+ files on a RAM disk", prefetched=True, in_memory=True),
    Step(name="+ vectorised preprocessing", prefetched=True, in_memory=True, vectorised=True),
    Step(name="+ one file in place of many", prefetched=True, vectorised=True, one_file=True),
    Step(name="+ copies on a stream", prefetched=True, vectorised=True, one_file=True, on_device=True),
    Step(name='dpex, "auto"', loader="dpex"),
    Step(name="+ dpex.cached", loader="dpex", cached=True),
    Step(name="+ __getitems__", loader="dpex", cached=True, vectorised=True),
    Step(name="+ device=", loader="dpex", cached=True, vectorised=True, on_device=True),
)


def small_files() -> Path:
    """Return the folder of the files, which is made if it is missing."""
    path = folder() / f"small-files-{FILES}"
    if not (path / "made").exists():
        path.mkdir(exist_ok=True)
        for number, encoded in enumerate(islice(_encoded(), FILES)):
            (path / f"{number}.jpg").write_bytes(encoded)
        (path / "made").touch()
    return path


def _encoded() -> Iterator[bytes]:
    photographs = encoded_photographs(400)
    for number in chain.from_iterable(repeat(range(len(photographs)))):
        image = cv2.imdecode(photographs[number], cv2.IMREAD_REDUCED_COLOR_2)
        yield cv2.imencode(".jpg", image, [cv2.IMWRITE_JPEG_QUALITY, 90])[1].tobytes()


class Decoded(Dataset[np.ndarray]):
    """The images of a folder: uint8 of shape (height, width, 3)."""

    def __init__(self, place: Path) -> None:
        self.place = place

    def __len__(self) -> int:
        return FILES

    def read(self, number: int) -> np.ndarray:
        """Return the bytes of a file."""
        return np.fromfile(self.place / f"{number}.jpg", np.uint8)

    def __getitem__(self, number: int) -> np.ndarray:
        cv2.setNumThreads(0)
        image: np.ndarray = cv2.imdecode(self.read(number), cv2.IMREAD_COLOR)
        return image


class InOneFile(Decoded):
    """The same images in one mapped file."""

    def __init__(self) -> None:
        super().__init__(small_files())
        self.blobs = Blobs.made("small-files", FILES, lambda count: islice(_encoded(), count))

    def read(self, number: int) -> np.ndarray:
        return self.blobs[number]


def cropped(image: np.ndarray) -> np.ndarray:
    """Return a random part of SIDE x SIDE pixels."""
    top, left = (random.randint(0, side - SIDE) for side in image.shape[:2])
    return image[top : top + SIDE, left : left + SIDE]


class Pictures(Dataset[torch.Tensor]):
    """Each image cropped and normalised alone: float32 of shape (3, SIDE, SIDE)."""

    def __init__(self, decoded: Any) -> None:
        self.decoded = decoded

    def __len__(self) -> int:
        return FILES

    def __getitem__(self, number: int) -> Any:
        planes = cropped(self.decoded[number]).astype(np.float32) / 255
        return torch.from_numpy(((planes - MEAN) / STD).transpose(2, 0, 1).copy())


class Crops(Pictures):
    """Crops as uint8 of shape (SIDE, SIDE, 3), a whole batch at once. They are normalised together."""

    def __getitems__(self, numbers: list[int]) -> list[np.ndarray]:
        return [cropped(self.decoded[number]) for number in numbers]


def normalised_together(crops: list[np.ndarray]) -> torch.Tensor:
    """Return float32 of shape (batch, 3, SIDE, SIDE)."""
    pixels = torch.from_numpy(np.stack(crops)).permute(0, 3, 1, 2)
    scale, shift = (torch.from_numpy(each).view(1, 3, 1, 1) for each in (1 / (255 * STD), -MEAN / STD))
    return torch.addcmul(shift, pixels.to(torch.float32).contiguous(), scale)


def prefetched(batches: Any, most: int = 4) -> Iterator[Any]:
    """Yield the batches that a thread takes ahead."""
    ahead: queue.Queue[Any] = queue.Queue(most)

    def take() -> None:
        for batch in batches:
            ahead.put(batch)

    threading.Thread(target=take, daemon=True).start()
    while True:
        yield ahead.get()


def epochs(loader: Any) -> Iterator[Any]:
    """Yield the batches of one epoch after the other."""
    while True:
        yield from loader


def course(step: Step, seconds: float) -> dict[str, Any]:
    """Return rate and waiting share of the second half, and what the diagnosis says of these settings."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        place = small_files()
        if step.in_memory:
            place = Path(shutil.copytree(place, Path(memory) / "files"))
        decoded: Any = InOneFile() if step.one_file else Decoded(place)
        if step.cached:
            decoded = dpex.cached(decoded, memory="2GB")
        dataset = (Crops if step.vectorised else Pictures)(decoded)
        arguments = {
            "batch_size": BATCH,
            "shuffle": True,
            "drop_last": True,
            "collate_fn": normalised_together if step.vectorised else default_collate,
        }
        is_ours = step.loader == "dpex"
        if not is_ours:
            loader: Any = DataLoader(dataset, num_workers=WORKERS, pin_memory=step.on_device, **arguments)
            found = _driven(step, loader, seconds)
        with DpexDataLoader(dataset, num_workers="auto" if is_ours else WORKERS, **arguments,
                            device="cuda" if is_ours and step.on_device else None) as ours:  # fmt: skip
            driven = _driven(step, ours, seconds)
            told = ours.diagnose()
        return {**(driven if is_ours else found), "verdict": told.verdict.title, "advice": told.advice}


def _driven(step: Step, loader: Any, seconds: float) -> dict[str, float]:
    batches = epochs(loader)
    if step.prefetched:
        batches = prefetched(batches)
    began, half, waited, count = time.perf_counter(), 0.0, 0.0, 0
    while (now := time.perf_counter()) - began < seconds:
        if not half and now - began > seconds / 2:
            half, waited, count = now, 0.0, 0
        batch = next(batches)
        waited += time.perf_counter() - now
        if step.on_device:
            batch = batch.to("cuda", non_blocking=True)
        else:
            read_pages(batch)
        time.sleep(STEP_S)
        count += 1
    return {"rate": count / (now - half), "waiting": waited / (now - half)}


def main(argument: str) -> None:
    """Run the step of that number for so many seconds ("3 8"), and print the results."""
    number, seconds = argument.split()
    print(json.dumps(course(STEPS[int(number)], float(seconds))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
