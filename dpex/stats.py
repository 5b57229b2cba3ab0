"""What ``loader.stats()`` returns: a snapshot value, safe to keep."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class LaneStats:
    """One lane at one moment; times are sums over the ``tickets`` it has made.

    ``wanted`` hosts were asked for by the user or the tuner, ``requested`` of them from the system, ``running`` exist.
    ``fetch_s``, ``collate_s`` and ``encode_s`` are wall seconds inside workers; ``cpu_s`` is CPU time of all three.
    """

    wanted: int = 0
    requested: int = 0
    running: int = 0
    in_flight: int = 0
    tickets: int = 0
    fetch_s: float = 0.0
    collate_s: float = 0.0
    encode_s: float = 0.0
    cpu_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class LoaderStats:
    """A loader at one moment.

    ``prefetch`` is the most batches that may be drawn and not yet delivered; ``in_flight`` are being made or wait for a
    worker, ``ready`` are made and wait for the consumer. ``ready_bytes`` are an estimate from the sizes seen.
    ``wait_s`` is wall time the consumer spent inside ``next()``, ``work_s`` between two calls of it (host time: it is
    not the GPU's stall). Of ``wait_s``, ``own_s`` is the part in which it was not blocked but busy (decoding, handing
    out work, making batches itself), ``head_s`` that in which later batches were ready and the next one was not.
    ``gpu_stall_s`` is how long the GPU's stream lay idle meanwhile, the first batch of a pass left out and the last few
    not yet known; None without a GPU (see `dpex.system.gpu.stall`).
    ``deaths`` counts workers that ended unexpectedly, ``remade`` tickets made again for them. ``lanes`` are "local",
    "remote" and, for batches made in the training process, "inline".

    Without workers, ``batches`` is all that is known unless metrics, `DpexDataLoader.diagnose` or ``DPEX_DIAGNOSE`` ask
    for a measurement, which adds the times. Iterators of PyTorch's own (``local_engine="torch"``) are not counted.
    """

    epoch: int = 0
    batches: int = 0
    prefetch: int = 0
    in_flight: int = 0
    ready: int = 0
    batch_bytes: float = 0.0
    ready_bytes: float = 0.0
    wait_s: float = 0.0
    own_s: float = 0.0
    head_s: float = 0.0
    work_s: float = 0.0
    first_batch_s: float = 0.0
    gpu_stall_s: float | None = None
    deaths: int = 0
    remade: int = 0
    lanes: Mapping[str, LaneStats] = field(default_factory=dict)

    @property
    def wait_ratio(self) -> float:
        """Share of the consumer's wall time spent waiting for batches, 0 to 1."""
        total = self.wait_s + self.work_s
        return self.wait_s / total if total else 0.0


class LastStats:
    """The figures of one iterator: read from ``source`` while it lives, and kept when it ends, however it ends.

    ``end`` takes no lock, as a garbage collection may call it anywhere.
    """

    def __init__(self, source: Callable[[], LoaderStats] = LoaderStats) -> None:
        self._source: Callable[[], LoaderStats] | None = source
        self._kept = LoaderStats()

    def end(self, last: LoaderStats | None = None) -> None:
        """Keep the figures as they are now, or ``last`` if the source cannot be read any more. Idempotent."""
        source = self._source
        if source is not None:
            self._kept = source() if last is None else last
            self._source = None

    def read(self) -> LoaderStats:
        """The present figures, or the last ones of an iterator that has ended."""
        source = self._source
        return self._kept if source is None else source()
