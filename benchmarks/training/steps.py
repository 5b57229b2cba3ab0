"""Training steps: ResNet-50 in bfloat16 on a GPU; where there is none, a wait that stands for one."""

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from benchmarks.training.networks import resnet50

LEARNING_RATE, MOMENTUM = 0.1, 0.9


class Step(Protocol):
    """What is done with each batch. device: where that must be, None: on the CPU."""

    device: torch.device | None

    def __call__(self, batch: Any) -> None:
        """Train; work of a device is queued, and not waited for."""

    def finish(self) -> None:
        """Wait for all of it."""


class Sleep:
    """A wait of so many seconds: the training thread has nothing to do, and the CPUs stay free for loading."""

    device = None

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __call__(self, _batch: Any) -> None:
        """See `Step`."""
        time.sleep(self.seconds)

    def finish(self) -> None:
        """See `Step`."""


class ResNetStep:
    """Forward, backward and an update of ResNet-50; of images (N, 3, 224, 224) in bfloat16 and classes (N,)."""

    def __init__(self, device: torch.device) -> None:
        self.device: torch.device | None = device
        torch.backends.cudnn.benchmark = True
        self._model = resnet50().to(device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._loss_of = torch.nn.CrossEntropyLoss()

    def __call__(self, batch: Any) -> None:
        """See `Step`."""
        images, labels = batch
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = self._loss_of(self._model(images), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def finish(self) -> None:
        """See `Step`."""
        if self.device is not None and self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def step_of(step_s: float, gpu: Callable[[], bool] = torch.cuda.is_available) -> Step:
    """Training on the GPU if there is one; else a wait of so many seconds."""
    return ResNetStep(torch.device("cuda", 0)) if gpu() else Sleep(step_s)
