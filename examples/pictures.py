"""The pictures that the examples train on. Nothing is downloaded.

`pictures` returns FashionMNIST where it is on disk, else scikit-learn's handwritten digits, enlarged from 8x8 to 28x28;
`torchvision.datasets.FashionMNIST("data", download=True)` puts FashionMNIST where it is looked for. The photographs
come with scikit-image and scikit-learn.
"""

import io
import random
import time
from itertools import product
from pathlib import Path

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


PHOTOGRAPHS = (
    *("astronaut", "cat", "coffee", "hubble_deep_field", "immunohistochemistry", "retina", "rocket"),
    *("stereo_motorcycle", "china.jpg", "flower.jpg"),
)
"""Photographs in colour that scikit-image and scikit-learn bring along."""
GRID = 8, 6
TILE = 160
"""Columns and rows that a photograph is cut into, and the side of a tile in pixels."""
TEST_EVERY = 5
CROP = 64


def photograph(name: str) -> Image.Image:
    """Return one of `PHOTOGRAPHS`."""
    if name.endswith(".jpg"):
        from sklearn.datasets import load_sample_image

        return Image.fromarray(load_sample_image(name))
    from skimage import data

    found = getattr(data, name)()
    return Image.fromarray(found[0] if isinstance(found, tuple) else found)


def write_tiles(folder: Path) -> tuple[list[tuple[Path, int]], list[tuple[Path, int]]]:
    """Cut each photograph into 48 tiles that do not overlap, and write them as JPEG files.

    Returns files and classes to train on, and every fifth to test with. A class is the photograph's place in
    `PHOTOGRAPHS`.
    """
    columns, rows = GRID
    files = []
    for label, name in enumerate(PHOTOGRAPHS):
        whole = photograph(name).resize((columns * TILE, rows * TILE))
        for number, (left, top) in enumerate(product(range(0, whole.width, TILE), range(0, whole.height, TILE))):
            path = folder / f"{Path(name).stem}-{number:02}.jpg"
            whole.crop((left, top, left + TILE, top + TILE)).save(path, quality=90)
            files.append((path, label))
    test = files[::TEST_EVERY]
    return [one for one in files if one not in test], test


class Tiles(Dataset[Picture]):
    """JPEG files, opened and decoded each time. Sample: float32 (3, 64, 64), normalised, and the class.

    With `is_augmented`, a random part is enlarged or shrunk to that size, and every other one mirrored. Each file
    comes `repeats` times. A sleep of `storage_s` stands for the time that a distant storage takes to open a file.
    """

    def __init__(
        self, files: list[tuple[Path, int]], *, is_augmented: bool = True, repeats: int = 1, storage_s: float = 0.0
    ) -> None:
        self.files = files
        self.is_augmented = is_augmented
        self.repeats = repeats
        self.storage_s = storage_s

    def __len__(self) -> int:
        return len(self.files) * self.repeats

    def __getitem__(self, index: int) -> Picture:
        path, label = self.files[index % len(self.files)]
        time.sleep(self.storage_s)
        with Image.open(path) as image:
            crop = resized_crop(image, CROP, random_square(image) if self.is_augmented else (0, 0, *image.size))
        if self.is_augmented and random.random() < 0.5:
            crop = crop[:, ::-1]
        return torch.from_numpy(normalised(crop)), label


def random_square(image: Image.Image) -> tuple[int, int, int, int]:
    """Return left, top, right and bottom of a random square, half of the image's height to all of it."""
    side = random.randint(image.height // 2, image.height)
    left, top = random.randint(0, image.width - side), random.randint(0, image.height - side)
    return left, top, left + side, top + side


def resized_crop(image: Image.Image, side: int, box: tuple[int, int, int, int]) -> np.ndarray:
    """Return that part of the image as uint8 (side, side, 3)."""
    return np.asarray(image.convert("RGB").resize((side, side), Image.Resampling.BILINEAR, box=box))


def normalised(image: np.ndarray) -> np.ndarray:
    """Return uint8 (height, width, 3) as float32 (3, height, width), from -1 to 1."""
    return np.ascontiguousarray(image.transpose(2, 0, 1), np.float32) / 127.5 - 1


class Photographs(Dataset[Picture]):
    """Photographs as JPEG files in a storage that takes `storage_s` seconds to answer.

    Sample: a random square of one of them, perhaps mirrored, float32 (3, 224, 224), and its class. Decoding is real;
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
        with Image.open(io.BytesIO(self.files[label])) as image:
            crop = resized_crop(image, 224, random_square(image))[:, :: random.choice((1, -1))]
        return torch.from_numpy(normalised(crop)), label


def jpeg(name: str) -> bytes:
    """Return one of the photographs, at the size of a file of ImageNet."""
    file = io.BytesIO()
    photograph(name).resize((500, 375)).save(file, "JPEG")
    return file.getvalue()
