"""Recordings in wave files: read, brought from 44.1 to 16 kHz, and made as loud as each other."""

import wave
from io import BytesIO

import numpy as np
import torch
from torch.utils.data import Dataset

from benchmarks.tables import data_file, rows_beyond_cache, write_whole
from benchmarks.works import ENDLESS

RATE_HZ, TARGET_HZ = 44_100, 16_000
SECONDS = 2
LOUDNESS = 0.1
"""Root mean square of a sample."""


class Recordings(Dataset[torch.Tensor]):
    """Sample: float32 of shape (32000,), two seconds at 16 kHz."""

    def __init__(self) -> None:
        count = rows_beyond_cache(2 * RATE_HZ * SECONDS)
        self.paths = [data_file(f"recording-{number}.wav") for number in range(count)]
        for number, path in enumerate(self.paths):
            if not path.exists():
                write_whole(path, [_recording(number)])

    def __len__(self) -> int:
        return ENDLESS

    def __getitem__(self, index: int) -> torch.Tensor:
        with wave.open(str(self.paths[index * 7919 % len(self.paths)])) as file:
            heard = np.frombuffer(file.readframes(file.getnframes()), "<i2").astype(np.float32)
        resampled = _resampled(heard, TARGET_HZ * SECONDS)
        return torch.from_numpy(resampled * (LOUDNESS / np.sqrt(np.mean(resampled**2))))


def _resampled(signal: np.ndarray, size: int) -> np.ndarray:
    """The same seconds in `size` values: frequencies that do not fit are left out."""
    spectrum = np.fft.rfft(signal)[: size // 2 + 1]
    return (np.fft.irfft(spectrum, size) * (size / len(signal))).astype(np.float32)


def _recording(number: int) -> bytes:
    """Some tones and noise as a wave file."""
    rng, moments_s = np.random.default_rng(number), np.arange(RATE_HZ * SECONDS) / RATE_HZ
    tones = sum(np.sin(2 * np.pi * hertz * moments_s) for hertz in rng.uniform(80, 4000, 4))
    heard = 4000 * (tones + rng.standard_normal(len(moments_s)) / 2)
    file = BytesIO()
    with wave.open(file, "wb") as written:
        written.setnchannels(1)
        written.setsampwidth(2)
        written.setframerate(RATE_HZ)
        written.writeframes(np.clip(heard, -32768, 32767).astype("<i2").tobytes())
    return file.getvalue()
