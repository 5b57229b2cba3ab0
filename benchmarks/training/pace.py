"""One loader under one training step: `python -m benchmarks.training.pace REQUEST`, where REQUEST is JSON.

The last line of the output is JSON: what the training loop got. A fresh process for each. The clock starts before
`iter()`; imports, the network and the loader's constructor are outside, and so is a first step with a made-up batch,
which compiles kernels.
"""

import json
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from itertools import repeat
from typing import Any, Literal

import torch
from torch.utils.data import DataLoader, Dataset, default_collate

from benchmarks.cluster import connected
from benchmarks.course import MARK_EVERY_S, Course
from benchmarks.training.photographs import JitteredPhotographs, Waiting, normalised_on_device
from benchmarks.training.steps import Step, step_of
from dpex.options import ClusterConfig, DeviceConfig
from dpex.system.gpu.events import cuda_stall

Work = Literal["photographs", "waits"]
Engine = Literal["torch", "dpex", "limit"]
GPU_PREFETCH = 4
"""torch's `prefetch_factor` with a GPU, whose steps are short and uneven; dpex finds its own."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """What to measure.

    engine: whose loader; "limit": one batch, again and again, nothing loaded. nodes: further Ray nodes on this machine,
    each a raylet that may use `node_cpus` CPUs. most_local: workers of "auto" on this machine, at most. seconds: from
    before `iter()` on. step_s: what a step takes where it is a wait.
    """

    work: Work
    engine: Engine
    batch: int
    seconds: float
    step_s: float
    workers: int | Literal["auto"] = 0
    nodes: int = 0
    node_cpus: int = 2
    most_local: int | None = None

    @property
    def key(self) -> str:
        """Of the contestant, such as "photographs dpex:auto" or "waits dpex:auto +2 nodes"."""
        workers = "" if self.engine == "limit" else f":{self.workers}"
        return f"{self.work} {self.engine}{workers}{f' +{self.nodes} nodes' if self.nodes else ''}"

    def to_json(self) -> str:
        """For the command line."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, kw_only=True)
class Pace:
    """What the training loop got. gpu_stall_s: of `seconds`, the GPU's stream waited for data; None without a GPU."""

    course: Course
    gpu_stall_s: float | None

    def as_dict(self) -> dict[str, Any]:
        """Its fields as plain data."""
        return {"course": self.course.as_dict(), "gpu_stall_s": self.gpu_stall_s}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Pace":
        """From what `as_dict` gave, also by way of JSON."""
        return cls(course=Course.from_dict(fields["course"]), gpu_stall_s=fields["gpu_stall_s"])


def drive(batches: Iterable[Any], step: Step, seconds: float) -> Pace:
    """Train for so long. Marks are of batches whose steps were launched; the end is that of the last step."""
    clock, gpu = time.perf_counter, cuda_stall() if step.device is not None else None
    began = mark_at = clock()
    taken, waited_s, marks = 0, 0.0, []
    iterator = iter(batches)
    while (asked := clock() if taken else began) - began < seconds:
        entered = gpu.enter() if gpu is not None else None
        batch = next(iterator, None)
        now = clock()
        waited_s += now - asked
        if gpu is not None:
            gpu.leave(entered, now - asked, starting=not taken, over=batch is None)
        if batch is None:
            break
        taken += 1
        if now >= mark_at:
            marks.append((now - began, taken))
            mark_at = now + MARK_EVERY_S
        step(batch)
    step.finish()
    course = Course(batches=taken, seconds=clock() - began, waited_s=waited_s, marks=tuple(marks))
    if gpu is None:
        return Pace(course=course, gpu_stall_s=None)
    gpu.leave(gpu.enter(), 0.0, starting=False, over=True)
    return Pace(course=course, gpu_stall_s=gpu.total_s)


def measure(request: Request) -> Pace:
    """See the module."""
    step = step_of(request.step_s)
    dataset = _dataset(request.work, step)
    batch = _on(step, default_collate([dataset[index] for index in range(request.batch)]))
    step(batch)
    step.finish()
    if request.engine == "limit":
        return drive(repeat(batch), step, request.seconds)
    with connected([request.node_cpus] * request.nodes), opened(request, dataset, step) as loader:
        return drive(loader, step, request.seconds)


def _dataset(work: Work, step: Step) -> Any:
    return Waiting() if work == "waits" else JitteredPhotographs(is_normalised=step.device is None)


def _on(step: Step, batch: Any) -> Any:
    """The batch as a step takes it."""
    if step.device is None:
        return batch
    return normalised_on_device(tuple(part.to(step.device, non_blocking=True) for part in batch))


def opened(request: Request, dataset: Dataset[Any], step: Step) -> AbstractContextManager[Iterable[Any]]:
    """The loader, whose batches are where the step wants them."""
    if request.engine == "torch":
        return nullcontext(_torch_batches(request, dataset, step))
    from dpex import AutotuneConfig, DpexDataLoader

    options: dict[str, Any] = {"batch_size": request.batch, "num_workers": request.workers}
    if request.workers == "auto":
        options["autotune"] = AutotuneConfig(max_local=request.most_local)
    if request.nodes:
        options |= {"distribute_mode": "auto", "cluster_config": ClusterConfig(ray_remote_args={"num_cpus": 1})}
    if step.device is not None:
        options |= {"device": step.device, "device_config": DeviceConfig(transform=normalised_on_device)}
    return DpexDataLoader(dataset, **options)


def _torch_batches(request: Request, dataset: Dataset[Any], step: Step) -> Iterable[Any]:
    """As people write it: pinned memory and copies that do not block, where there is a GPU."""
    options: dict[str, Any] = {"batch_size": request.batch, "num_workers": request.workers}
    if step.device is None:
        return DataLoader(dataset, **options)
    if request.workers:
        options["prefetch_factor"] = GPU_PREFETCH
    return _Moved(DataLoader(dataset, pin_memory=True, **options), step)


class _Moved:
    """Its batches on the device of the step."""

    def __init__(self, loader: DataLoader[Any], step: Step) -> None:
        self._loader, self._step = loader, step

    def __iter__(self) -> Iterator[Any]:
        return (_on(self._step, batch) for batch in self._loader)


def main(arguments: list[str]) -> None:
    """See the module."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    print(json.dumps(measure(Request(**json.loads(arguments[0]))).as_dict()), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
