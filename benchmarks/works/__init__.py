"""The works of the benchmark: real loading code on data that the benchmark makes itself, one subject a module.

Invariants of every dataset here: it is made the same way in every measurement (fixed seeds), its `__getitem__` depends
on the index alone (and on the random state where it augments), it pickles, its samples have one shape, and what it
reads is larger than the last-level cache, unless it only waits.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

ENDLESS = 1_000_000_000
"""Length, in samples, of datasets whose pass should outlast any measuring window."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A dataset and how it is batched.

    make: "module:function" in this package, called for the dataset. counted: it takes the number of batches of the
    measurement, as its samples depend on it. service: "module:function" of a context manager, whose value the dataset
    is made with: what the dataset talks to, running beside it. forms: as ``make``, asynchronous datasets with the same
    samples, by name.
    """

    make: str
    batch_size: int
    gpu_batch_size: int = 256
    counted: bool = False
    service: str | None = None
    forms: Mapping[str, str] = field(default_factory=dict)

    @contextmanager
    def opened(self, count: int | None = None, form: str | None = None) -> Iterator[Any]:
        """The dataset in a form, for as long as its service runs. Makes its files if they are missing."""
        make = self.make if form is None else self.forms[form]
        arguments: list[Any] = [count or 1] if self.counted else []
        if self.service is None:
            yield _named(make)(*arguments)
            return
        service: AbstractContextManager[Any] = _named(self.service)()
        with service as value:
            yield _named(make)(*arguments, value)


def _named(place: str) -> Callable[..., Any]:
    """The function at "module:function"; modules are imported late, as some need packages of their own."""
    module, _, name = place.partition(":")
    found: Callable[..., Any] = getattr(import_module(f"{__name__}.{module}"), name)
    return found


WORKS: dict[str, Work] = {
    "floats": Work(make="tensors:floats", batch_size=1),
    "few-floats": Work(make="tensors:floats", batch_size=16),
    "small-images": Work(make="tensors:small_images", batch_size=100),
    "large-batches": Work(make="tensors:large_images", batch_size=64),
    "jpeg": Work(make="jpeg:JpegPhotographs", batch_size=64),
    "random-jpeg": Work(make="jpeg:RandomPixels", batch_size=32),
    "jitter": Work(make="jitter:JitteredPhotographs", batch_size=64),
    "waiting-images": Work(make="waits:Pictures", batch_size=32),
    "wait": Work(make="waits:steady", batch_size=16, forms={"async": "waits:async_steady"}),
    "skewed-wait": Work(make="waits:skewed", batch_size=16, forms={"async": "waits:async_skewed"}),
    "shifting-wait": Work(make="waits:Shifting", batch_size=16, counted=True),
    "slow-shards": Work(make="waits:shards", batch_size=16),
    "http": Work(
        make="web:Downloads",
        batch_size=16,
        service="web:server",
        forms={"aiohttp": "web:AiohttpDownloads", "fsspec": "web:FsspecDownloads"},
    ),
    "video": Work(make="video:Clips", batch_size=8),
    "text": Work(make="text:Documents", batch_size=64),
    "tokens": Work(make="tokens:Passages", batch_size=8),
    "audio": Work(make="audio:Recordings", batch_size=16),
}
