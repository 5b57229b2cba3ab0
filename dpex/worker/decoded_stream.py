"""`dpex.decode_in_workers`, which users see: a stream of samples, and what makes of each what training needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import IterableDataset

from dpex.errors import OptionError


class DecodedStream(IterableDataset[Any]):
    """The samples of ``source``, each decoded by ``fn``; made by `dpex.decode_in_workers`, which says what it does.

    Other attributes are those of ``source``, such as ``num_shards`` and ``set_epoch``.
    """

    def __init__(self, source: Iterable[Any], fn: Callable[[Any], Any]) -> None:
        self.source = source
        self.fn = fn

    def __iter__(self) -> Iterator[Any]:
        return self.decode(iter(self.source))

    def decode(self, samples: Iterator[Any]) -> Iterator[Any]:
        """Decode each sample of an iterator, in order."""
        return (self.fn(sample) for sample in samples)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "source":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.source, name)


class _SizedDecodedStream(DecodedStream):
    """The same of a source that has a length."""

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]


def decode_in_workers(source: Iterable[Any], fn: Callable[[Any], Any]) -> IterableDataset[Any]:
    """Have the samples of a stream read by few workers and decoded by many.

    torch's workers each read a stream and decode what they read, so a dataset of two shards keeps two workers busy, and
    no more. With a `DpexDataLoader` under ``num_workers="auto"``, and with ``seeding="batch"``, the samples of
    ``source`` are drawn by one worker for each stream, in the batches and the order in which torch's workers would have
    drawn them, on this machine, and ``fn`` is called for them by any number of others, here or on the cluster, which is
    tuned as it is for a map-style dataset. With ``seeding="worker"``, and with PyTorch's own loader, the stream is read
    and decoded by the same worker.

    What ``source`` yields is pickled on its way to whoever decodes it, so let it be small: compressed bytes, names of
    files, text. Random numbers that ``fn`` draws depend on the base seed, the epoch and the number of the batch alone.

    Args:
        source: An iterable dataset, or anything else that can be iterated anew for each epoch. With several workers
            each iterates it for itself, so it has to see to it that each yields its part, as with torch.
        fn: What makes of a sample what training needs. It is called once for each, in any order and in any worker.

    Returns:
        An iterable dataset of what ``fn`` returns.

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
