"""Clips from video files at random places: seek, decode some frames, make them smaller."""

import os
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import data_file, rows_beyond_cache
from benchmarks.works import ENDLESS

WIDTH, HEIGHT, FRAMES = 320, 240, 200
FRAME_BYTES = 15_000
"""Less than the average frame takes, so that the files together are larger than the cache."""
CLIP, OUT = 4, 112
LEAST_FILES = 2
FRAMES_PER_S = 25.0


class Clips(Dataset[torch.Tensor]):
    """Sample: four frames in a row, uint8 of shape (4, 112, 112, 3). Every process opens the files for itself."""

    def __init__(self) -> None:
        count = rows_beyond_cache(FRAMES * FRAME_BYTES, LEAST_FILES)
        self.paths = [data_file(f"video-{number}.avi") for number in range(count)]
        for number, path in enumerate(self.paths):
            if not path.exists():
                _write(path, number)
        self._forget()

    def _forget(self) -> None:
        self.captures: dict[int, cv2.VideoCapture] = {}
        self.pid = os.getpid()

    def __getstate__(self) -> list[Path]:
        return self.paths

    def __setstate__(self, paths: list[Path]) -> None:
        self.paths = paths
        self._forget()

    def __len__(self) -> int:
        return ENDLESS

    def _capture(self, number: int) -> cv2.VideoCapture:
        if self.pid != os.getpid():
            self._forget()  # a file's position is shared with the parent after a fork
        if number not in self.captures:
            self.captures[number] = cv2.VideoCapture(str(self.paths[number]))
        return self.captures[number]

    def __getitem__(self, index: int) -> torch.Tensor:
        cv2.setNumThreads(0)  # OpenCV's own threads would blur what a worker is
        capture = self._capture(index * 7919 % len(self.paths))
        capture.set(cv2.CAP_PROP_POS_FRAMES, index * 104_729 % (FRAMES - CLIP))
        frames = [cv2.resize(capture.read()[1], (OUT, OUT)) for _ in range(CLIP)]
        return torch.from_numpy(np.stack(frames))


def _write(path: Path, number: int) -> None:
    unfinished = path.with_suffix(f".{os.getpid()}.avi")
    writer = cv2.VideoWriter(str(unfinished), cv2.VideoWriter.fourcc(*"MJPG"), FRAMES_PER_S, (WIDTH, HEIGHT))
    for frame in _frames(number):
        writer.write(frame)
    writer.release()
    unfinished.replace(path)


def _frames(number: int) -> Iterator[np.ndarray]:
    """A window that wanders over a picture of noise at several scales."""
    rng = np.random.default_rng(number)
    scales = [rng.random((HEIGHT // scale, WIDTH // scale, 3), dtype=np.float32) for scale in (2, 8, 40)]
    picture = sum(cv2.resize(one, (2 * WIDTH, 2 * HEIGHT), interpolation=cv2.INTER_CUBIC) for one in scales)
    pixels = np.clip(255 * picture / len(scales), 0, 255).astype(np.uint8)
    for frame in range(FRAMES):
        top, left = frame * HEIGHT // FRAMES, frame * WIDTH // FRAMES
        yield np.ascontiguousarray(pixels[top : top + HEIGHT, left : left + WIDTH])
