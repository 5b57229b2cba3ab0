"""One training of the origin's network, in a process of its own, which prints a line of JSON.

The network has two convolution blocks of 32 and 64 channels (batch norm, ReLU, max-pool) and three linear layers of
600, 120 and 10, with a dropout of 0.25; Adam, learning rate 0.001, batches of 100. The data have FashionMNIST's shape:
scikit-learn's digits, enlarged to 28x28. Each is shifted at random by up to two pixels, so a batch depends on the
random numbers of its worker.
"""

import hashlib
import json
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset, DistributedSampler

from dpex import DpexDataLoader

BATCH = 100
HELD_OUT = 297
REPEATS = 4
"""Times that an epoch has each of the 1,500 digits."""
MOST_SHIFT = 2
RANKS = 2
WAYS = ("single", "DataParallel", "DDP")


@dataclass(frozen=True, kw_only=True)
class Run:
    """A row of the table.

    Attributes:
        way: One of `WAYS`.
        loader: "torch" or "dpex".
        arguments: Those of the loader.
        epochs: Epochs of training.
    """

    way: str
    loader: str
    arguments: dict[str, Any] = field(default_factory=dict)
    epochs: int = 3


class Digits(Dataset[tuple[torch.Tensor, int]]):
    """Samples: float32 of shape (1, 28, 28) in [0, 1], and the digit."""

    def __init__(self, *, train: bool) -> None:
        from sklearn.datasets import load_digits

        images, labels = load_digits(return_X_y=True)
        small = torch.tensor(images, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        part = slice(None, -HELD_OUT) if train else slice(-HELD_OUT, None)
        self.images = nn.functional.interpolate(small[part], size=28, mode="bilinear")
        self.labels = labels[part].tolist()
        self.is_shifted = train

    def __len__(self) -> int:
        return len(self.labels) * (REPEATS if self.is_shifted else 1)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = index % len(self.labels)
        image = self.images[number]
        if self.is_shifted:
            down, right = torch.randint(-MOST_SHIFT, MOST_SHIFT + 1, (2,)).tolist()
            image = image.roll((down, right), (1, 2))
        return image, self.labels[number]


def network() -> nn.Module:
    """float32 (N, 1, 28, 28) to (N, 10) scores."""
    return nn.Sequential(
        *(nn.Conv2d(1, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(32, 64, 3), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
        *(nn.Linear(64 * 6 * 6, 600), nn.Dropout(0.25), nn.Linear(600, 120), nn.Linear(120, 10)),
    )


def timed(batches: Iterable[Any], waits: list[float]) -> Iterator[Any]:
    """Yield the batches, and append the seconds that each took to come."""
    iterator, end = iter(batches), object()
    while True:
        began = time.perf_counter()
        batch = next(iterator, end)
        waits.append(time.perf_counter() - began)
        if batch is end:
            return
        yield batch


def train(run: Run, rank: int = 0) -> dict[str, Any]:
    """Train in this process, which is a rank if the way is "DDP"; return the columns of the row."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    data, device = Digits(train=True), "cuda" if torch.cuda.is_available() else "cpu"
    model: nn.Module = network().to(device)
    if run.way == "DataParallel":
        model = nn.DataParallel(model)  # without a GPU, the module itself
    if run.way == "DDP":
        model = DistributedDataParallel(model)
    torch.manual_seed(1 + rank)  # what the dropout draws
    sampler = DistributedSampler(data) if run.way == "DDP" else None
    loader_class: Any = DataLoader if run.loader == "torch" else DpexDataLoader
    loader = loader_class(
        data,
        batch_size=BATCH,
        shuffle=sampler is None,
        sampler=sampler,
        generator=torch.Generator().manual_seed(2 + rank),
        **run.arguments,
    )
    optimizer, loss_of = torch.optim.Adam(model.parameters(), lr=0.001), nn.CrossEntropyLoss()
    waits: list[float] = []
    began = time.perf_counter()
    for epoch in range(run.epochs):
        if sampler is not None:
            sampler.set_epoch(epoch)
        for images, labels in timed(loader, waits):
            loss = loss_of(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    seconds = time.perf_counter() - began
    tested = Digits(train=False)
    model.eval()
    with torch.no_grad():
        scores = model(tested.images.to(device)).argmax(1).cpu()
    plain = model.module if hasattr(model, "module") else model
    return {
        "accuracy": float((scores == torch.tensor(tested.labels)).float().mean()),
        "loss": loss.item(),
        "weights": weights_hash(plain),
        "epoch_s": seconds / run.epochs,
        "waiting": sum(waits) / seconds,
    }


def weights_hash(model: Any) -> str:
    """Return the beginning of the SHA-256 of all parameters and buffers."""
    found = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        found.update(name.encode() + tensor.cpu().contiguous().numpy().tobytes())
    return found.hexdigest()[:12]


def _rank(rank: int, run: Run, folder: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=RANKS)
    found = train(run, rank)
    if rank == 0:
        (Path(folder) / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def main(argument: str) -> None:
    """Train as `Run` in JSON says, and print the columns."""
    run = Run(**json.loads(argument))
    if run.way != "DDP":
        print(json.dumps(train(run)))
        return
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(_rank, (run, folder), nprocs=RANKS)
        print((Path(folder) / "found.json").read_text())


def as_argument(run: Run) -> str:
    """Return the argument of `main`."""
    return json.dumps(asdict(run))


if __name__ == "__main__":
    main(sys.argv[1])
