"""Training on a GPU: ResNet-50 in bfloat16, and the time for which the GPU's stream waits for data.

`make gpu-proof` uses it. ResNet-50 is written out, so that torchvision is not needed.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from benchmarks.course import Course, drive
from benchmarks.works.jpeg import MEAN, STD
from dpex.options import DeviceConfig
from dpex.system.gpu.stall import cuda_stall

LEARNING_RATE, MOMENTUM = 0.1, 0.9
IMAGENET_CLASSES = 1000
STAGES = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width and number of the blocks of ResNet-50's stages (He et al., 2015, table 1)."""
EXPANSION = 4
"""A block of ResNet-50 gives so many times its width."""


def normalised_on_device(batch: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 (N, 3, H, W) to bfloat16 with the colours last in memory, normalised; on the device that it is on."""
    images, labels = batch
    mean, std = (255 * value.to(images.device) for value in (MEAN, STD))
    prepared = images.float().sub_(mean).div_(std).bfloat16()
    return prepared.contiguous(memory_format=torch.channels_last), labels


class Trainer:
    """Forward, backward and an update of ResNet-50; of images (N, 3, 224, 224) in bfloat16 and classes (N,)."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        torch.backends.cudnn.benchmark = True
        self._model = resnet50().to(device, memory_format=torch.channels_last)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        self._loss_of = nn.CrossEntropyLoss()

    def step(self, batch: Any) -> None:
        """Train; work of the device is queued, and not waited for."""
        images, labels = batch
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = self._loss_of(self._model(images), labels)
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()
        self._optimizer.step()

    def finish(self) -> None:
        """Wait for all steps."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def warm_up(self, batch: Any) -> None:
        """Train on a batch of the dataset, which compiles kernels."""
        self.step(self.moved(batch))
        self.finish()

    def moved(self, batch: Any) -> Any:
        """The batch of a loader as a step takes it."""
        images, labels = (part.to(self.device, non_blocking=True) for part in batch)
        return normalised_on_device((images, labels))

    def moving(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The batches of a loader as steps take them; the loader starts with the first."""
        for batch in loader:
            yield self.moved(batch)

    def dpex_options(self) -> dict[str, Any]:
        """The arguments with which dpex's loader gives batches as steps take them."""
        return {"device": self.device, "device_config": DeviceConfig(transform=normalised_on_device)}

    def drive(self, loader: Iterable[Any], window_s: float) -> Course:
        """Train for that long. Marks are of batches whose steps were launched; the end is that of the last step."""
        gpu = cuda_stall()
        if gpu is None:
            return drive(loader, self.step, window_s=window_s, finish=self.finish)
        course = drive(_metered(loader, gpu), self.step, window_s=window_s, finish=self.finish)
        gpu.leave(gpu.enter(), 0.0, starting=False, over=True)
        return replace(course, gpu_stall_s=gpu.total_s)


def _metered(loader: Iterable[Any], gpu: Any) -> Iterator[Any]:
    """The batches of a loader, with marks on the GPU's stream before and after each call of next()."""
    iterator, is_first, is_over = iter(loader), True, False
    while not is_over:
        mark, asked_s = gpu.enter(), time.perf_counter()
        batch = next(iterator, None)
        is_over = batch is None
        gpu.leave(mark, time.perf_counter() - asked_s, starting=is_first, over=is_over)
        is_first = False
        if not is_over:
            yield batch


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions beside a shortcut; (N, `inputs`, H, W) to (N, 4 * `width`, H/stride, W/stride)."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = EXPANSION * width
        self.main = nn.Sequential(
            *_convolved(inputs, width, 1),
            nn.ReLU(inplace=True),
            *_convolved(width, width, 3, stride),
            nn.ReLU(inplace=True),
            *_convolved(width, outputs, 1),
        )
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Sequential(*_convolved(inputs, outputs, 1, stride))
        self.after = nn.ReLU(inplace=True)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """See the class."""
        summed: torch.Tensor = self.after(self.main(images) + self.shortcut(images))
        return summed


def _convolved(inputs: int, outputs: int, size: int, stride: int = 1) -> tuple[nn.Module, nn.Module]:
    return nn.Conv2d(inputs, outputs, size, stride, size // 2, bias=False), nn.BatchNorm2d(outputs)


def resnet50() -> nn.Module:
    """ResNet-50 with the stride in the 3x3 convolution, as torchvision has it; (N, 3, 224, 224) to (N, 1000)."""
    blocks: list[nn.Module] = []
    inputs = STAGES[0][0]
    for number, (width, count) in enumerate(STAGES):
        for place in range(count):
            blocks.append(Bottleneck(inputs, width, 2 if number and not place else 1))
            inputs = EXPANSION * width
    stem = (*_convolved(3, STAGES[0][0], 7, 2), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1))
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inputs, IMAGENET_CLASSES))
