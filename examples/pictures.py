"""The pictures that the examples train on. Nothing is downloaded.

`pictures` returns FashionMNIST where it is on disk, else scikit-learn's handwritten digits, enlarged from 8x8 to 28x28;
`torchvision.datasets.FashionMNIST("data", download=True)` puts FashionMNIST where it is looked for.
"""

import numpy as np
import torch
from PIL import Image
from torch.utils.data import Dataset

Picture = tuple[torch.Tensor, int]


class Digits(Dataset[Picture]):
    """scikit-learn's digits: the first four fifths to train on, the rest to test with.

    Sample: float32 (1, 28, 28) in [0, 1], and the class.
    """

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
    """Return an image of 8x8 in [0, 1] as float32 28x28."""
    return np.asarray(Image.fromarray(image.astype(np.float32)).resize((28, 28), Image.Resampling.BILINEAR))


def pictures(*, train: bool, root: str = "data") -> Dataset[Picture]:
    """Return FashionMNIST from `root` if torchvision and the files are there, else the digits; a line says so."""
    try:
        from torchvision.datasets import FashionMNIST
        from torchvision.transforms import ToTensor

        return FashionMNIST(root, train=train, transform=ToTensor(), download=False)
    except (ImportError, RuntimeError) as reason:
        print(f"FashionMNIST is not here ({reason}); scikit-learn's handwritten digits are used instead.")
        return Digits(train=train)
