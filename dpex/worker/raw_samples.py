"""What a ticket carries in place of indices, where samples are drawn in one worker and decoded in another.

The worker that reads a stream pickles the samples of a batch (`pickled`, in place of a collate function). The training
process does not look into them: it hands the bytes on, as a `RawSamples`, to whoever decodes the batch, and keeps them
until that is done. An error that the stream raised takes the place of its batch as a `FailedRead`.
"""

from __future__ import annotations

import pickle
from typing import Any

from dpex.measure.readable import size


class RawSamples:
    """The samples of one batch, pickled."""

    __slots__ = ("_count", "_pickle")

    def __init__(self, count: int, pickle: bytes) -> None:
        self._count = count
        self._pickle = pickle

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Bytes of the pickle."""
        return len(self._pickle)

    def samples(self) -> list[Any]:
        """The samples, anew with each call."""
        samples: list[Any] = pickle.loads(self._pickle)
        return samples

    def __repr__(self) -> str:
        return f"<{self._count} samples of a stream, {size(self.nbytes)}>"


class FailedRead:
    """The error that a stream raised where a batch was due."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __call__(self) -> FailedRead:
        """Itself: it needs no decoding."""
        return self


def pickled(samples: list[Any]) -> tuple[int, bytes]:
    """What a worker that reads sends of a batch."""
    return len(samples), pickle.dumps(samples, 5)


def pickled_alone(sample: Any) -> tuple[int, bytes]:
    """The same of a loader that does not batch."""
    return pickled([sample])


def shown(index: Any) -> Any:
    """What is remembered of a ticket for people: its index, but of raw samples only what they are."""
    return repr(index) if type(index) is RawSamples else index
