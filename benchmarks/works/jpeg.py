"""The work of most vision training: decode a JPEG, crop and resize at random, normalise.

The photographs are those that scikit-image ships, enlarged or shrunk to about 500x375 (the usual size of an
ImageNet file) and encoded with quality 90; their bytes lie in one mapped file.
"""

import random
from collections.abc import Iterator

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import Blobs, rows_beyond_cache
from benchmarks.works import ENDLESS

WIDTH, HEIGHT = 500, 375
CROP = 224
MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
PHOTOGRAPHS = ("astronaut", "cat", "coffee", "rocket")


FILE_BYTES = 40_000
"""Less than the average file has, so that the files together are larger than the cache."""
QUALITY = 90


def encoded_photographs(most: int | None = None) -> Blobs:
    """The files: different crops of each photograph, mirrored or not, as JPEG bytes. With `most` no more than that,
    also where the cache then holds them all."""
    count = rows_beyond_cache(FILE_BYTES)
    return Blobs.made("photographs", count if most is None else min(count, most), _files)


def _files(count: int) -> Iterator[bytes]:
    from skimage import data

    rng = np.random.default_rng(0)
    pictures = [cv2.cvtColor(getattr(data, name)(), cv2.COLOR_RGB2BGR) for name in PHOTOGRAPHS]
    for number in range(count):
        picture = pictures[number % len(pictures)]
        top, left = (int(rng.integers(0, side // 5 + 1)) for side in picture.shape[:2])
        resized = cv2.resize(picture[top:, left:], (WIDTH, HEIGHT), interpolation=cv2.INTER_CUBIC)
        turned = cv2.flip(resized, 1) if rng.random() < 0.5 else resized
        yield cv2.imencode(".jpg", turned, [cv2.IMWRITE_JPEG_QUALITY, QUALITY])[1].tobytes()


RANDOM_SIDE = 256
RANDOM_FILE_BYTES = 39_000
"""Less than any such file has at `RANDOM_QUALITY`."""
RANDOM_QUALITY = 75


def _random_files(count: int) -> Iterator[bytes]:
    rng, quality = np.random.default_rng(0), [cv2.IMWRITE_JPEG_QUALITY, RANDOM_QUALITY]
    for _ in range(count):
        pixels = rng.integers(0, 256, (RANDOM_SIDE, RANDOM_SIDE, 3), np.uint8)
        yield cv2.imencode(".jpg", pixels, quality)[1].tobytes()


def random_window(height: int, width: int) -> tuple[slice, slice]:
    """Rows and columns of a random window of 8 to 100 % of the area and 3:4 to 4:3 in shape.

    The ranges are those of torchvision's RandomResizedCrop.
    """
    area = height * width * random.uniform(0.08, 1.0)
    ratio = random.uniform(3 / 4, 4 / 3)
    crop_w = min(width, max(1, round((area * ratio) ** 0.5)))
    crop_h = min(height, max(1, round((area / ratio) ** 0.5)))
    left, top = random.randint(0, width - crop_w), random.randint(0, height - crop_h)
    return slice(top, top + crop_h), slice(left, left + crop_w)


def random_resized_crop(image: np.ndarray) -> np.ndarray:
    """A random window (`random_window`) of an image, resized to CROP x CROP."""
    return cv2.resize(image[random_window(*image.shape[:2])], (CROP, CROP), interpolation=cv2.INTER_LINEAR)


def normalised(image: np.ndarray) -> torch.Tensor:
    """uint8 (height, width, 3) to float32 (3, height, width), in the steps of ToTensor and Normalize."""
    planes = torch.from_numpy(image).permute(2, 0, 1).contiguous()
    return planes.to(torch.float32).div(255).sub_(MEAN).div_(STD)


def prepared(encoded: np.ndarray) -> torch.Tensor:
    """The bytes of a file to float32 of shape (3, 224, 224)."""
    cv2.setNumThreads(0)  # OpenCV's own threads would blur what a worker is
    image = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    return normalised(cv2.cvtColor(random_resized_crop(image), cv2.COLOR_BGR2RGB))


class JpegPhotographs(Dataset[tuple[torch.Tensor, int]]):
    """Sample: normalised float32 of shape (3, 224, 224), number of the file."""

    def __init__(self, files: Blobs | None = None) -> None:
        self.files = files or encoded_photographs()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        number = index % len(self.files)
        return prepared(self.files[number]), number


class RandomPixels(JpegPhotographs):
    """256x256 random pixels: RANDOM of "An Overview of the Data-Loader Landscape" (Ofeidis et al., 2022)."""

    def __init__(self) -> None:
        super().__init__(Blobs.made("random-pixels", rows_beyond_cache(RANDOM_FILE_BYTES), _random_files))
