"""A stream in two parts: samples are drawn by the worker that reads the stream, and decoded by any worker.

`decode_in_workers` makes such a stream. `RawStream` is the dataset of the workers that read, and `Decoding` the dataset
of the workers that decode. Both hold the user's own dataset, and look at its parts when an epoch begins in the worker.

A reading worker pickles the samples of a batch (`pickled`, in place of a collate function). The training process passes
the bytes on without unpickling them. The batch's ticket holds a `RawSamples` in place of indices until the batch is
decoded, or a `FailedRead` if the stream raised an error.
"""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from dpex.errors import OptionError
from dpex.measure.readable import size
from dpex.worker.states import is_stateful, load_state, state_of


class DecodedStream(IterableDataset[Any]):
    """The samples of ``source``, each decoded by ``fn``; made by `dpex.decode_in_workers`.

    Other attributes are read from ``source``, such as ``num_shards`` and ``set_epoch``.
    """

    def __init__(self, source: Iterable[Any], fn: Callable[[Any], Any]) -> None:
        self.source = source
        self.fn = fn

    def __iter__(self) -> Iterator[Any]:
        if not inspect.iscoroutinefunction(self.fn):
            return (self.fn(sample) for sample in self.source)
        from dpex.worker.async_loop import loop_of_process

        run = loop_of_process().run
        return (run(self.fn(sample)) for sample in self.source)

    def __copy__(self) -> DecodedStream:
        """Return a stream with a copy of the source, because logical workers in one process must not share
        its position."""
        copied = object.__new__(type(self))
        vars(copied).update(vars(self), source=copy.copy(self.source))
        return copied

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)


class _SizedDecodedStream(DecodedStream):
    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


def decode_in_workers(source: Iterable[Any], fn: Callable[[Any], Any]) -> IterableDataset[Any]:
    """Split the work on a stream: few workers read its samples, and many workers decode them.

    Each worker of torch reads a stream and decodes the samples that it reads, so a dataset of two shards keeps at most
    two workers busy. A `DpexDataLoader` with ``num_workers="auto"`` or ``seeding="batch"`` reads the samples of
    ``source`` with one worker for each stream, on this machine. Torch's workers would give the same batches in the same
    order. Any number of other workers call ``fn``, on this machine or on the cluster; the tuner sets this number as it
    does for a map-style dataset. With ``seeding="worker"``, and with PyTorch's own loader, one worker reads and
    decodes.

    Samples of ``source`` are pickled on their way to the worker that decodes them, so they should be small: compressed
    bytes, names of files, text. If other workers decode, random numbers that ``fn`` draws depend only on the base seed,
    the epoch and the number of the batch.

    Args:
        source: An iterable dataset, or any object that can be iterated anew for each epoch. As with torch, it must
            yield a different part in each worker.
        fn: A function of a sample of ``source``. If it waits, write an ``async def``. A worker then runs several calls
            at the same time. Any worker may call ``fn``, once for each sample, in any order.

    Returns:
        An iterable dataset of the values that ``fn`` returns.

    Raises:
        OptionError: ``source`` cannot be iterated, or ``fn`` cannot be called. It is a ValueError.

    Examples:
        >>> from dpex import DpexDataLoader, decode_in_workers
        >>> dataset = decode_in_workers(range(6), str)
        >>> with DpexDataLoader(dataset, batch_size=3, num_workers=1, seeding="batch") as loader:
        ...     print(list(loader))
        [['0', '1', '2'], ['3', '4', '5']]
    """
    if not hasattr(source, "__iter__"):
        raise OptionError(f"decode_in_workers(source={source!r}): give an iterable dataset, or another iterable")
    if not callable(fn):
        raise OptionError(f"decode_in_workers(fn={fn!r}): give a function of a sample")
    kind = _SizedDecodedStream if hasattr(source, "__len__") else DecodedStream
    return kind(source, fn)


# -- reading -----------------------------------------------------------------------------------------------------------


class RawStream(IterableDataset[Any]):
    """The samples of a `DecodedStream` as they are drawn, before they are decoded."""

    def __init__(self, dataset: DecodedStream) -> None:
        self.dataset = dataset
        self._source: Any = None
        self._state: Any = None

    def __iter__(self) -> Iterator[Any]:
        source = self._source = self.dataset.source
        state, self._state = self._state, None
        load_state(source, state)
        return iter(source)

    def __copy__(self) -> RawStream:
        return type(self)(copy.copy(self.dataset))


class _StatefulRawStream(RawStream):
    def state_dict(self) -> Any:
        """Return the state of the source that is being read; None before the first epoch."""
        return state_of(self._source)

    def load_state_dict(self, state: Any) -> None:
        """Give the state to the source when the next epoch begins."""
        self._state = state


def raw_stream_of(dataset: DecodedStream) -> RawStream:
    return (_StatefulRawStream if is_stateful(dataset.source) else RawStream)(dataset)


def pickled(samples: list[Any]) -> tuple[int, bytes]:
    """Return the number of samples of a batch and their pickle, which a reading worker sends."""
    return len(samples), pickle.dumps(samples, 5)


def pickled_alone(sample: Any) -> tuple[int, bytes]:
    """Return the result of `pickled` for the single sample of a loader that does not batch."""
    return pickled([sample])


# -- passing on --------------------------------------------------------------------------------------------------------


class RawSamples:
    __slots__ = ("_count", "_data")

    def __init__(self, count: int, data: bytes) -> None:
        self._count = count
        self._data = data

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        return len(self._data)

    def samples(self) -> list[Any]:
        """Unpickle the samples, anew with each call."""
        samples: list[Any] = pickle.loads(self._data)
        return samples

    def __repr__(self) -> str:
        return f"<{self._count} samples of a stream, {size(self.nbytes)}>"


class FailedRead:
    """The error that a stream raised in place of a batch."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error: Exception = error

    def __call__(self) -> FailedRead:
        """Return itself, because an error needs no decoding."""
        return self


# -- decoding ----------------------------------------------------------------------------------------------------------


class Decoding:
    """A map-style dataset that decodes the `RawSamples` of a ticket."""

    def __init__(self, dataset: DecodedStream) -> None:
        self.dataset = dataset
        self.is_asynchronous: bool = inspect.iscoroutinefunction(dataset.fn)

    def __getitem__(self, raw: Any) -> Any:
        return self.__getitems__(raw)[0]

    def __getitems__(self, raw: Any) -> list[Any]:
        if isinstance(raw, FailedRead):
            raise raw.error
        assert isinstance(raw, RawSamples)
        return [self.dataset.fn(sample) for sample in raw.samples()]


def users_dataset(dataset: Any) -> Any:
    """Return the user's dataset of a `RawStream` or `Decoding`, and any other dataset as it is."""
    return dataset.dataset if isinstance(dataset, (RawStream, Decoding)) else dataset
