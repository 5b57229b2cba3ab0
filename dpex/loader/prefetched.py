"""`dpex.prefetch`: any iterable, drawn from in the background, its batches on a device, measured as a loader is."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from dpex.device.arguments import parse
from dpex.device.feed import open_feed
from dpex.diagnose.facts import Subject
from dpex.diagnose.source import DiagnosisSource
from dpex.errors import IteratorClosedError
from dpex.loader import at_exit
from dpex.loader.background import Background
from dpex.loader.runtime import LoaderRuntime
from dpex.options import DeviceConfig, MetricsConfig, check_count, checked, names_its_options
from dpex.schedule.names import encodable
from dpex.stats import LastStats, LoaderStats
from dpex.system.cpus import rank
from dpex.system.gpu.events import cuda_stall

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis

T = TypeVar("T")


class PrefetchedIterator(Iterator[T]):
    """An iterator over a pass. Its thread ends with it: at the end, by ``break``, by an exception or when dropped."""

    def __init__(self, background: Background, ends: list[Callable[[], None]], runtime: LoaderRuntime) -> None:
        self._runtime = runtime  # its metrics last as long as the pass, even if the iterable is dropped
        self._background = background
        self._pid = os.getpid()
        self._returned: list[T] = []
        self.last_stats = LastStats(background.stats)
        self._finalizer = weakref.finalize(self, _end, background, self.last_stats, ends, self._pid)
        background.start()

    def __iter__(self) -> PrefetchedIterator[T]:
        return self

    def __next__(self) -> T:
        if os.getpid() != self._pid:
            raise IteratorClosedError(
                f"this iterator belongs to process {self._pid}, from which this one was forked: its thread is there. "
                "Iterate anew in this process"
            )
        hand: list[T] = []
        returned = self._returned
        try:
            if returned:
                hand += (returned[0],)
                del returned[0]
            else:
                self._background.next(hand)
        except BaseException as error:
            returned += hand  # it was interrupted: the batch comes next time
            if isinstance(error, StopIteration):
                self._finalizer()
                self._background = _Exhausted  # type: ignore[assignment]
            raise
        return hand[0]

    def _shutdown_workers(self) -> None:
        self._finalizer()


class _Exhausted:
    """In place of the background of a pass that has ended."""

    @staticmethod
    def next(hand: list[Any]) -> None:
        raise StopIteration


def _end(background: Background, last_stats: LastStats, ends: list[Callable[[], None]], pid: int) -> None:
    if os.getpid() != pid:
        return
    last_stats.end()
    for end in ends:
        end()
    background.stop()


class Prefetched(Generic[T]):
    """An iterable that is drawn from in the background; made by `dpex.prefetch`, which says what it does.

    Each ``iter()`` begins a pass of its own, as far as the iterable allows. It is a context manager that closes itself.
    """

    def __init__(self, iterable: Iterable[T], depth: int, options: Mapping[str, Any]) -> None:
        self.iterable = iterable
        self.depth = depth
        self.device = parse(options["device"])
        self.device_config: DeviceConfig = options["device_config"]
        self._options = options
        self._runtime = LoaderRuntime()

    def __len__(self) -> int:
        """As many batches as the iterable says it has; TypeError if it does not say."""
        return len(self.iterable)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[T]:
        runtime, options, transform = self._runtime, self._options, self.device_config.transform
        feed = open_feed(self.device, self.device_config.budget_bytes, transform)
        if feed is not None and transform is not None:
            feed.have_transformed(transform, int(torch.empty((), dtype=torch.int64).random_().item()))
        at_exit.watch(runtime.counters, self._source().diagnose, os.environ)
        background = Background(iter(self.iterable), self.depth, feed, cuda_stall())
        ends: list[Callable[[], None]] = [runtime.counters.open(background).end]
        port = options["metrics_port"]
        config = options["metrics_config"] if port is None else MetricsConfig(port=port)
        kind = type(self.iterable).__name__
        metrics = runtime.metrics(config, options["name"], (kind, "", "worker"))
        if metrics is not None:
            metrics.case = self._source()
            ends.append(metrics.watch(background).end)
        iterator: PrefetchedIterator[T] = PrefetchedIterator(background, ends, runtime)
        runtime.iterators.add(iterator)  # type: ignore[arg-type]
        runtime.last_stats = iterator.last_stats
        return iterator

    @property
    def metrics_url(self) -> str | None:
        """Address of the live page, from the first ``iter()`` until it is closed; None where no metrics are served."""
        return self._runtime.metrics_url

    def stats(self) -> LoaderStats:
        """Return a snapshot of the latest pass; see `LoaderStats`. "inline" is what the iterable took in its thread."""
        return self._runtime.last_stats.read()

    def diagnose(self, *, reset: bool = False) -> Diagnosis:
        """Explain why training waits for data, as `DpexDataLoader.diagnose` does.

        Args:
            reset: Whether the next diagnosis is about what comes from now on.

        Returns:
            A verdict with its evidence. ``print`` shows the report.
        """
        found = self._source().diagnose()
        if reset:
            self._runtime.counters.restart()
        return found

    def _source(self) -> DiagnosisSource:
        subject = Subject(
            name=encodable(self._options["name"] or ""),
            rank=rank(os.environ),
            dataset=encodable(type(self.iterable).__name__),
            keeps_workers=True,
            note="anything: no batch was delivered yet",
            untimed="steps of an iterable are not known",
        )
        return DiagnosisSource(book=self._runtime.counters, subject=subject)

    def close(self) -> None:
        """End all passes and the export of metrics; both may begin anew. It may be called repeatedly."""
        self._runtime.close()

    def __enter__(self) -> Prefetched[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@names_its_options
def prefetch(
    iterable: Iterable[T],
    depth: int = 2,
    device: str | torch.device | None = None,
    *,
    device_config: DeviceConfig | None = None,
    name: str | None = None,
    metrics_port: int | None = None,
    metrics_config: MetricsConfig | None = None,
) -> Prefetched[T]:
    """Draw from any iterable of batches in the background, and bring them to a device ahead of need.

    Each pass has one thread, which calls ``next()`` of the iterable's iterator while training runs. That helps as far
    as the iterable waits or computes outside the interpreter's lock. Errors come where the batch would have been, with
    their traceback; a pass ends cleanly with a ``break``, an exception, or when its iterator is dropped. What the
    iterable draws from global random generators, it draws from those of training: give it generators of its own.

    Args:
        iterable: A source of batches: a generator, a loader of any kind. It can be iterated again if it allows that.
        depth: The maximum number of batches that wait for the training loop.
        device: The device on which batches arrive, as for `DpexDataLoader`.
        device_config: A transform on the device, and its memory, as for `DpexDataLoader`. The base seed of the
            transform's random numbers is drawn from torch's global generator at ``iter()``.
        name: The name in metrics, as for `DpexDataLoader`.
        metrics_port: The port for the live page and for Prometheus, as for `DpexDataLoader`.
        metrics_config: Port, address and TLS of the metrics, as for `DpexDataLoader`.

    Returns:
        An iterable with ``stats()``, ``diagnose()`` and ``close()``.

    Raises:
        OptionError: An option has a value that makes no sense. It is a ValueError.

    Examples:
        >>> import dpex
        >>> batches = dpex.prefetch((number * number for number in range(4)), depth=2)
        >>> list(batches)
        [0, 1, 4, 9]
        >>> batches.stats().batches
        4
    """
    check_count("depth", depth, least=1)
    given = {"device": device, "device_config": device_config, "name": name}
    return Prefetched(
        iterable, depth, checked({**given, "metrics_port": metrics_port, "metrics_config": metrics_config})
    )
