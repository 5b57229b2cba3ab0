"""What a worker process must get along with."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dpex import DpexDataLoader

cv2 = pytest.importorskip("cv2")


class Resized:
    """Resizes an image in the worker, as the trainer did before."""

    def __init__(self) -> None:
        self.image = np.zeros((1500, 2000, 3), np.uint8)
        self.resize()

    def resize(self) -> torch.Tensor:
        return torch.from_numpy(cv2.GaussianBlur(cv2.resize(self.image, (700, 500)), (9, 9), 2))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.resize()


@pytest.mark.timeout(240)
def test_opencv_s_threads_were_running_when_the_worker_was_forked() -> None:
    """Setting OpenCV's thread count in a forked worker once waited for ever for threads the fork had not copied."""
    assert len(list(DpexDataLoader(Resized(), batch_size=2, num_workers=2))) == 4
