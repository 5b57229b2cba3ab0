"""Train with batches that arrive on the device: uint8 crosses the bus, and the device makes floats of it.

    python examples/feed.py              # on the GPU, or on the CPU where there is none

The data are FashionMNIST where it is on disk (see `pictures.py`), else scikit-learn's digits, kept as bytes.
"""

import argparse
from itertools import islice
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from dpex import DpexDataLoader
from dpex.options import DeviceConfig
from pictures import pictures


class Bytes(Dataset[tuple[torch.Tensor, int]]):
    """The pictures with uint8 pixels, as they are stored. Sample: uint8 (1, 28, 28), and the class."""

    def __init__(self, source: Any) -> None:
        self.source = source

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label = self.source[index]
        return (image * 255).to(torch.uint8), label


def augment(batch: Any) -> Any:
    """Shift half of the batches by up to 2 pixels, and make normalised floats; on the device."""
    images, labels = batch
    if torch.rand(()) < 0.5:
        down, right = torch.randint(-2, 3, (2,)).tolist()
        images = images.roll((down, right), (-2, -1))
    return images.float().div(255).sub(0.5).div(0.25), labels


def main() -> None:
    """Train, and print loss, and what the device took for its batches."""
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=2, help="passes over the data (2)")
    options.add_argument("--limit", type=int, metavar="N", help="end each epoch after N batches")
    chosen = options.parse_args()

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = nn.Sequential(nn.Flatten(), nn.Linear(28 * 28, 128), nn.ReLU(), nn.Linear(128, 10)).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    loss_of = nn.CrossEntropyLoss()

    loader = DpexDataLoader(
        Bytes(pictures(train=True)),
        batch_size=100,
        shuffle=True,
        num_workers="auto",
        device=device,
        device_config=DeviceConfig(transform=augment),
    )
    with loader:
        for epoch in range(chosen.epochs):
            seen = 0
            for images, labels in islice(loader, chosen.limit):
                loss = loss_of(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                seen += len(labels)
            print(f"epoch {epoch + 1}: {seen} images on {images.device.type}, loss {loss.item():.3f}")
        facts = loader.diagnose().facts
    print(f"the device transform took {1e3 * (facts.feed_transform_s or 0.0) / facts.batches:.2f} ms per batch")


if __name__ == "__main__":
    main()
