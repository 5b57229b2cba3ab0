"""The pictures the examples train on: FashionMNIST where it is on disk, else scikit-learn's digits.

Nothing is downloaded. `torchvision.datasets.FashionMNIST("data", download=True)` puts FashionMNIST where it
is looked for; the handwritten digits come with scikit-learn and are enlarged from 8x8 to 28x28. The photographs come
with scikit-image.
"""

import random
import time

import numpy as np
import torch
from torch.utils.data import Dataset

Picture = tuple[torch.Tensor, int]


class Digits(Dataset[Picture]):
    """scikit-learn's digits, the first four fifths to train on. Sample: float32 (1, 28, 28), class."""

    def __init__(self, *, train: bool) -> None:
        from sklearn.datasets import load_digits

        digits = load_digits()
        split = len(digits.target) * 4 // 5
        part = slice(None, split) if train else slice(split, None)
        self.images = np.stack([enlarge(image / 16) for image in digits.images[part]])
        self.labels = digits.target[part].tolist()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> Picture:
        return torch.from_numpy(self.images[index])[None], self.labels[index]


def enlarge(image: np.ndarray) -> np.ndarray:
    """8x8 in [0, 1] to float32 28x28."""
    import cv2

    return cv2.resize(image.astype(np.float32), (28, 28), interpolation=cv2.INTER_LINEAR)


def pictures(*, train: bool, root: str = "data") -> Dataset[Picture]:
    """FashionMNIST from `root` if torchvision and the files are there, else the digits; a line says so."""
    try:
        from torchvision.datasets import FashionMNIST
        from torchvision.transforms import ToTensor

        return FashionMNIST(root, train=train, transform=ToTensor(), download=False)
    except (ImportError, RuntimeError) as reason:
        print(f"FashionMNIST is not here ({reason}): handwritten digits instead")
        return Digits(train=train)


class Photographs(Dataset[Picture]):
    """scikit-image's photographs as JPEG files in a storage that takes `storage_s` seconds to answer.

    Sample: a random window of one of them, perhaps mirrored, float32 (3, 224, 224), and its class. Decoding is real;
    the storage is a sleep, whose length may be changed while workers run: it is in memory that they share.
    """

    def __init__(self, length: int, storage_s: float) -> None:
        self.length = length
        self.files = [jpeg(name) for name in ("astronaut", "cat", "coffee", "rocket")]
        self.storage_s = torch.tensor(storage_s, dtype=torch.float64).share_memory_()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Picture:
        time.sleep(float(self.storage_s))
        label = index % len(self.files)
        return torch.from_numpy(window(decoded(self.files[label]))), label


def jpeg(name: str) -> bytes:
    """One of scikit-image's photographs, at the size of an ImageNet file."""
    import cv2
    from skimage import data

    picture = cv2.cvtColor(getattr(data, name)(), cv2.COLOR_RGB2BGR)
    return cv2.imencode(".jpg", cv2.resize(picture, (500, 375)))[1].tobytes()


def decoded(file: bytes) -> np.ndarray:
    """uint8 (height, width, 3)."""
    import cv2

    cv2.setNumThreads(0)
    return cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)


def window(image: np.ndarray, side: int = 224) -> np.ndarray:
    """A random square, a half to all of the height, perhaps mirrored, as float32 (3, side, side) in [0, 1]."""
    import cv2

    height, width = image.shape[:2]
    size = random.randint(height // 2, height)
    top, left = random.randint(0, height - size), random.randint(0, width - size)
    square = image[top : top + size, left : left + size][:, :: random.choice((1, -1))]
    small = cv2.resize(square, (side, side), interpolation=cv2.INTER_LINEAR)
    return np.ascontiguousarray(small.transpose(2, 0, 1), np.float32) / 255
