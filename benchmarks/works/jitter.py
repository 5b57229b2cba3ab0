"""Heavy preprocessing, as vision training has it: decode a JPEG, crop and resize at random, jitter its colours.

The files are those of the benchmark (`benchmarks.works.jpeg`). What is drawn is drawn from Python's generator, which
torch's workers and dpex's both seed.
"""

import random

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.works import ENDLESS
from benchmarks.works.jpeg import encoded_photographs, normalised, random_resized_crop

BRIGHTNESS = CONTRAST = SATURATION = 0.4
HUE = 0.1
"""How far each may be changed, as parts of it; hue as a part of its circle. Usual values in training on ImageNet."""
HUES = 180
"""Of the circle, as OpenCV keeps them in a byte."""
CLASSES = 1000
MOST_FILES = 4000
"""Making one takes 5 ms, and large processors have caches for ten thousands; what is measured is computing."""


class JitteredPhotographs(Dataset[tuple[torch.Tensor, int]]):
    """Sample: float32 (3, 224, 224), normalised, or uint8 where a GPU is there to do that; and a class."""

    def __init__(self) -> None:
        self.files = encoded_photographs(MOST_FILES)
        self.is_normalised = not torch.cuda.is_available()

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        cv2.setNumThreads(0)  # OpenCV's own threads would blur what a worker is
        number = index % len(self.files)
        image = cv2.cvtColor(cv2.imdecode(self.files[number], cv2.IMREAD_COLOR), cv2.COLOR_BGR2RGB)
        crop = jittered(random_resized_crop(image))
        if self.is_normalised:
            return normalised(crop), number % CLASSES
        return torch.from_numpy(crop).permute(2, 0, 1).contiguous(), number % CLASSES


def jittered(image: np.ndarray) -> np.ndarray:
    """uint8 RGB of any size with other brightness, contrast, saturation and hue, each drawn."""
    bright = cv2.convertScaleAbs(image, alpha=_factor(BRIGHTNESS))
    contrast = _factor(CONTRAST)
    grey = cv2.cvtColor(bright, cv2.COLOR_RGB2GRAY)
    level = np.full_like(bright, round(float(grey.mean())))
    contrasted = cv2.addWeighted(bright, contrast, level, 1 - contrast, 0)
    saturation = _factor(SATURATION)
    colourless = cv2.cvtColor(cv2.cvtColor(contrasted, cv2.COLOR_RGB2GRAY), cv2.COLOR_GRAY2RGB)
    saturated = cv2.addWeighted(contrasted, saturation, colourless, 1 - saturation, 0)
    turned = cv2.cvtColor(saturated, cv2.COLOR_RGB2HSV)
    turn = round(random.uniform(-HUE, HUE) * HUES)
    turned[..., 0] = (turned[..., 0].astype(np.int16) + turn) % HUES
    return cv2.cvtColor(turned, cv2.COLOR_HSV2RGB)


def _factor(most: float) -> float:
    return random.uniform(1 - most, 1 + most)
