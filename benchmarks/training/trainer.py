"""One loader trains the small network, once for each seed: `python -m benchmarks.training.trainer JOB`, JOB is JSON.

The last line of the output is JSON: a list of trainings. A fresh process for each loader; the ranks of DDP are
processes below it. On the CPU, every process computes with one thread, so that sums are added up in one order.
"""

import hashlib
import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from benchmarks.training.networks import small_network
from benchmarks.training.pictures import Data, Pictures, load

Devices = Literal["single", "data-parallel", "ddp"]
Place = Literal["torch", "local", "remote", "auto"]
DEVICES: tuple[Devices, ...] = get_args(Devices)
PLACES: tuple[Place, ...] = get_args(Place)
BATCH = 100
LEARNING_RATE = 0.001
WORKERS = 2
RANKS = 2
TEST_BATCH = 500


@dataclass(frozen=True, kw_only=True)
class Job:
    """What one process trains.

    limit: batches of an epoch, at most. data: the folder with FashionMNIST's files. is_shifted: each picture is moved
    by a few pixels at random. address: of the Ray cluster for remote workers.
    """

    devices: Devices
    place: Place
    seeds: tuple[int, ...]
    epochs: int
    limit: int | None = None
    data: str | None = None
    is_shifted: bool = False
    address: str | None = None

    @property
    def key(self) -> str:
        """Of the row, such as "ddp:auto" or "single:local:shifted"."""
        return ":".join([self.devices, self.place, *(["shifted"] if self.is_shifted else [])])

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Job":
        """From what `to_json` gave."""
        fields = json.loads(text)
        return cls(**fields | {"seeds": tuple(fields["seeds"])})


@dataclass(frozen=True, kw_only=True)
class Training:
    """What came of one seed.

    accuracy: the share of the test pictures that were told right, 0 to 1. losses: the mean of each epoch. curve: the
    SHA-256 of the losses of all steps as float64. weights: that of all parameters in the end.
    """

    data: str
    seed: int
    steps: int
    seconds: float
    accuracy: float
    losses: tuple[float, ...]
    curve: str
    weights: str

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Training":
        """From its fields as they come out of JSON."""
        return cls(**fields | {"losses": tuple(fields["losses"])})


def run(job: Job) -> list[Training]:
    """All trainings of the job, by rank 0 where there are ranks."""
    if job.devices != "ddp":
        return trained(job)
    with TemporaryDirectory(prefix="dpex-ranks-") as folder:
        torch.multiprocessing.spawn(_rank, (job.to_json(), folder), nprocs=RANKS)
        each = [json.loads((Path(folder) / f"{rank}.json").read_text()) for rank in range(RANKS)]
    ends = [[training["weights"] for training in ranks] for ranks in zip(*each, strict=True)]
    if any(len(set(weights)) > 1 for weights in ends):
        raise RuntimeError(f"the ranks of {job.key} ended with different weights")
    return [Training.from_dict(training) for training in each[0]]


def _rank(rank: int, job: str, folder: str) -> None:
    """One of them; ranks meet in a file, which needs no free port."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.environ |= {"WORLD_SIZE": str(RANKS), "LOCAL_WORLD_SIZE": str(RANKS)}
    with_gpus = torch.cuda.device_count() >= RANKS
    if with_gpus:
        torch.cuda.set_device(rank)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("nccl" if with_gpus else "gloo", init_method=meeting, rank=rank, world_size=RANKS)
    found = trained(Job.from_json(job))
    (Path(folder) / f"{rank}.json").write_text(json.dumps([asdict(training) for training in found]))
    dist.barrier()
    dist.destroy_process_group()


def trained(job: Job) -> list[Training]:
    """All trainings of the job in this process, or in this rank."""
    torch.set_num_threads(1)
    data = load(Path(job.data) if job.data else None, is_shifted=job.is_shifted)
    return [train(job, seed, data) for seed in job.seeds]


def train(job: Job, seed: int, data: Data) -> Training:
    """One training. What a rank draws beside the weights it begins with is its own."""
    began = time.perf_counter()
    device = _device()
    torch.manual_seed(seed)
    plain = small_network().to(device)
    model = _spread(plain, job.devices)
    torch.manual_seed(seed + 1000 * _rank_number())
    optimizer, loss_of = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE), nn.CrossEntropyLoss()
    epochs: list[list[float]] = []
    with opened(job, seed, data.train) as loader:
        for epoch in range(job.epochs):
            _begin(loader, epoch)
            losses = []
            for images, labels in islice(loader, job.limit):
                loss = loss_of(model(images.to(device)), labels.to(device))
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses.append(loss.item())
            epochs.append(losses)
    every = [loss for losses in epochs for loss in losses]
    found = Training(
        data=data.name,
        seed=seed,
        steps=len(every),
        seconds=round(time.perf_counter() - began, 2),
        accuracy=accuracy(plain, data.test, device),
        losses=tuple(sum(losses) / len(losses) for losses in epochs),
        curve=hashlib.sha256(torch.tensor(every, dtype=torch.float64).numpy().tobytes()).hexdigest(),
        weights=fingerprint(plain),
    )
    del model  # one that outlives its process group can abort the process at exit
    return found


def _device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")


def _rank_number() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _spread(model: nn.Module, devices: Devices) -> nn.Module:
    if devices == "single":
        return model
    return nn.DataParallel(model) if devices == "data-parallel" else DistributedDataParallel(model)


@contextmanager
def opened(job: Job, seed: int, dataset: Pictures) -> Iterator[DataLoader[Any]]:
    """The loader of a job. Every place draws the same order: from the sampler, or from a generator with this seed."""
    options: dict[str, Any] = {"batch_size": BATCH, "num_workers": WORKERS, "persistent_workers": True}
    if job.devices == "ddp":
        options["sampler"] = DistributedSampler(dataset, seed=seed)
    else:
        options["shuffle"] = True
    options["generator"] = torch.Generator().manual_seed(seed)
    if job.place == "torch":
        yield DataLoader(dataset, **options)
        return
    from dpex import DpexDataLoader

    options |= {"seeding": "batch"}
    if job.place == "auto":
        options["num_workers"] = "auto"
    if job.place == "remote":
        options |= {"distribute_mode": True, "head_address": job.address}
    with DpexDataLoader(dataset, **options) as loader:
        yield loader


def _begin(loader: DataLoader[Any], epoch: int) -> None:
    if isinstance(loader.sampler, DistributedSampler):
        loader.sampler.set_epoch(epoch)


@torch.no_grad()
def accuracy(model: nn.Module, pictures: Pictures, device: torch.device) -> float:
    """The share that is told right, 0 to 1."""
    model.eval()
    right = 0
    for images, labels in DataLoader(pictures, batch_size=TEST_BATCH):
        right += int((model(images.to(device)).argmax(1).cpu() == labels).sum())
    model.train()
    return right / len(pictures)


def fingerprint(model: nn.Module) -> str:
    """The SHA-256 of all parameters. Running statistics are left out: each rank of DDP has its own after a step."""
    found = hashlib.sha256()
    for name, parameter in model.named_parameters():
        found.update(name.encode())
        found.update(parameter.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def main(arguments: Iterable[str]) -> None:
    """See the module."""
    (job,) = map(Job.from_json, arguments)
    print(json.dumps([asdict(training) for training in run(job)]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
