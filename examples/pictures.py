"""The pictures the examples train on: FashionMNIST where it is on disk, else scikit-learn's digits.

Nothing is downloaded. `torchvision.datasets.FashionMNIST("data", download=True)` puts FashionMNIST where it
is looked for; the handwritten digits come with scikit-learn and are enlarged from 8x8 to 28x28.
"""

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
