"""JPEG decoding on the GPU beside decoding in workers: `python -m benchmarks.gpu_decode`.

ResNet-50 trains on photographs of 500x375. *Workers decode*: a sample is decoded, cropped at random and resized there.
*The GPU decodes*: a sample is the file's bytes, and `DeviceConfig(transform=...)` decodes and crops the batch with
nvImageCodec (`pip install nvidia-nvimgcodec-cu13[all]`). Without a GPU both run on CPUs, which shows that the program
works, and nothing about speed.
"""

from __future__ import annotations

import argparse
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from benchmarks.gpu import IMAGENET_CLASSES, Trainer, normalised_on_device
from benchmarks.works import ENDLESS
from benchmarks.works.jitter import MOST_FILES
from benchmarks.works.jpeg import CROP, encoded_photographs, random_resized_crop, random_window
from dpex import DeviceConfig, DpexDataLoader

HOST = -99999
"""nvImageCodec's number of the device where only CPUs decode."""


class Files(Dataset[tuple[bytes, int]]):
    """Sample: the bytes of a JPEG file, and a class."""

    def __init__(self) -> None:
        self.files = encoded_photographs(MOST_FILES)

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[bytes, int]:
        number = index % len(self.files)
        return self.files[number].tobytes(), number % IMAGENET_CLASSES


class Decoded(Files):
    """Sample: uint8 (3, 224, 224), decoded, cropped at random and resized here, and a class."""

    def __getitem__(self, index: int) -> Any:
        import cv2

        cv2.setNumThreads(0)
        data, label = super().__getitem__(index)
        image = cv2.cvtColor(cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        return torch.from_numpy(random_resized_crop(image)).permute(2, 0, 1).contiguous(), label


def listed(samples: list[tuple[bytes, int]]) -> tuple[list[bytes], torch.Tensor]:
    """Collate files of different lengths as a list."""
    files, labels = zip(*samples, strict=True)
    return list(files), torch.tensor(labels)


def cropped(image: torch.Tensor) -> torch.Tensor:
    """Return a random window of an image (H, W, 3), resized, as float32 (3, 224, 224)."""
    window = image[random_window(*image.shape[:2])].permute(2, 0, 1)[None].float()
    return interpolate(window, size=(CROP, CROP), mode="bilinear", antialias=True)[0]


class Decoder:
    """A device transform: (list of N files, labels) to images bfloat16 (N, 3, 224, 224), normalised, and labels."""

    def __init__(self) -> None:
        from nvidia import nvimgcodec

        self._is_gpu = torch.cuda.is_available()
        host = {"device_id": HOST, "backends": [nvimgcodec.Backend(nvimgcodec.BackendKind.CPU_ONLY)]}
        self._decoder = nvimgcodec.Decoder(**({"device_id": torch.cuda.current_device()} if self._is_gpu else host))

    def __call__(self, batch: tuple[list[bytes], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        files, labels = batch
        stream = torch.cuda.current_stream().cuda_stream if self._is_gpu else 0
        images = self._decoder.decode(files, cuda_stream=stream)
        if failed := [number for number, image in enumerate(images) if image is None]:
            raise ValueError(f"samples {failed} of the batch cannot be decoded")
        tensors = [
            torch.from_dlpack(image) if self._is_gpu else torch.from_numpy(np.asarray(image)) for image in images
        ]
        return normalised_on_device((torch.stack([cropped(tensor) for tensor in tensors]), labels))


def main() -> None:
    """Print images/s of each, in rounds in which they take turns."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_decode", description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=12.0)
    parser.add_argument("--batch", type=int, default=128)
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    trainer = Trainer(device)
    ways: dict[str, tuple[Dataset[Any], dict[str, Any]]] = {
        "workers decode": (Decoded(), {"device_config": DeviceConfig(transform=normalised_on_device)}),
        "the GPU decodes": (Files(), {"device_config": DeviceConfig(transform=Decoder()), "collate_fn": listed}),
    }
    for number in range(asked.rounds):
        for name, (dataset, options) in ways.items():
            options = {"device": device, "num_workers": "auto"} | options
            with DpexDataLoader(dataset, batch_size=asked.batch, **options) as loader:
                course = trainer.drive(loader, asked.seconds)
            rates = asked.batch * course.rate, asked.batch * course.settled_rate
            print(f"round {number}, {name}: {rates[0]:,.0f} images/s, second half {rates[1]:,.0f}", flush=True)


if __name__ == "__main__":
    main()
