"""Image filters of OpenCV with the threads that it starts itself: as many as the machine has cores."""

import cv2
import numpy as np
import torch

from benchmarks.tables import Rows, Table
from benchmarks.works import ENDLESS

SIDE, OUT = 512, 224
SIGMA = 3.0
"""Pixels; of the Gaussian blur, which OpenCV splits among its threads."""
DEGREES = 15.0


class Filtered(Rows):
    """Sample: float32 of shape (3, 224, 224), a picture of 512x512 blurred, turned and made smaller."""

    def __getitem__(self, index: int) -> torch.Tensor:
        picture = self.row(index).numpy()
        blurred = cv2.GaussianBlur(picture, (0, 0), SIGMA)
        turn = cv2.getRotationMatrix2D((SIDE / 2, SIDE / 2), DEGREES, 1.0)
        turned = cv2.warpAffine(blurred, turn, (SIDE, SIDE))
        small = cv2.resize(turned, (OUT, OUT), interpolation=cv2.INTER_AREA)
        return torch.from_numpy(np.ascontiguousarray(small.transpose(2, 0, 1)))


def filtered() -> Filtered:
    """Pictures from a table larger than the last-level cache."""
    return Filtered(Table.beyond_cache("pictures", (SIDE, SIDE, 3)), ENDLESS)
