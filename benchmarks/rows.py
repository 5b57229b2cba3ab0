"""The rows: which work, under which consumer, and who takes part.

Everybody is measured in the same rounds: torch and dpex with every count of workers, dpex's "auto", and the
rivals where they are asked for. A row's name says what is not a default.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from benchmarks.consumer import Use
from benchmarks.contestants import AUTO, Contestant

COUNTS = (0, 1, 2, 4, 8, 16, 32, 64)
WAITING_COUNTS = (16, 32, 64)
"""Those at which torch is best where workers wait; there it also has other prefetch factors than its 2."""
PREFETCHES = (4, 16)
ACTORS_AHEAD = (2, 4, 16)
WAITING_THREADS = (8, 32, 64)
"""The rivals' threads where workers wait."""

Kind = Literal["local", "start", "remote"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    step_s: what the consumer waits after each batch. counted: everybody takes the same number of batches, as many as
    the step allows in the window, in place of the same time: where the cost of a batch depends on its number. long:
    everybody has as long a window as "auto": where a few slow samples decide how far a short one reaches.
    waits: workers wait rather than compute, so more of them than cores pay, and dpex is measured with
    `seeding="batch"` too, beside its default, unless a step hides the difference. rivals: whether those of the other
    environment know the work.
    """

    key: str
    title: str
    work: str
    kind: Kind = "local"
    step_s: float = 0.0
    counted: bool = False
    long: bool = False
    waits: bool = False
    use: Use = "read"
    rivals: tuple[str, ...] = ()

    @property
    def same_length(self) -> bool:
        """Whether everybody has as many batches, or as many seconds, as "auto", so that whole courses compare."""
        return self.counted or self.long

    def count(self, window_s: float) -> int | None:
        """Batches of a measurement of that length, in thirds; None: as many as fit."""
        if self.kind == "start":
            return 1
        return 3 * max(1, round(window_s / self.step_s / 3)) if self.counted else None

    def contestants(self, cores: int, *, rivals: bool = False) -> tuple[Contestant, ...]:
        """Who takes part on a machine with so many cores."""
        found = PLANS[self.kind](self, cores)
        return (*found, *_rivals(self, cores)) if rivals else found


def _local(row: Row, cores: int) -> tuple[Contestant, ...]:
    counts = sorted({*COUNTS, cores})
    found = [Contestant(engine=engine, workers=count) for engine in ("torch", "dpex") for count in counts]
    if row.waits:
        found += [
            Contestant(engine="torch", workers=count, prefetch=factor)
            for count in WAITING_COUNTS
            for factor in PREFETCHES
        ]
    if row.waits and not row.step_s:
        found += [Contestant(engine="dpex", workers=count, seeding="batch") for count in counts]
    return (*found, AUTO)


def _start(_row: Row, cores: int) -> tuple[Contestant, ...]:
    fixed = (Contestant(engine=engine, workers=count) for engine in ("torch", "dpex") for count in sorted({0, cores}))
    return (*fixed, AUTO)


def _remote(_row: Row, cores: int) -> tuple[Contestant, ...]:
    actors = (Contestant(engine="actors", workers=cores, prefetch=ahead) for ahead in ACTORS_AHEAD)
    return (*actors, Contestant(engine="dpex-remote", workers=cores))


PLANS: dict[Kind, Callable[[Row, int], tuple[Contestant, ...]]] = {
    "local": _local,
    "start": _start,
    "remote": _remote,
}


def _rivals(row: Row, cores: int) -> list[Contestant]:
    """Each with a small sweep of its own setting."""
    threads = WAITING_THREADS if row.waits else sorted({cores, 2 * cores, 8})
    sweeps: dict[str, tuple[int | Literal["auto"], ...]] = {
        "spdl": tuple(threads),
        "grain-threads": tuple(threads),
        "nodes-threads": tuple(threads),
        "grain-processes": (cores,),
        "nodes-processes": (32,) if row.waits else (cores,),
        "tf.data": (cores, "auto"),
        "dali": tuple(threads),
        "ray-data": (8, 32) if row.waits else (cores,) if row.kind == "remote" else (cores, 2 * cores),
    }
    return [Contestant(engine=engine, workers=workers) for engine in row.rivals for workers in sweeps[engine]]


PYTHON_RIVALS = ("spdl", "grain-threads", "grain-processes", "nodes-threads", "nodes-processes", "ray-data")
ALL_RIVALS = (*PYTHON_RIVALS, "tf.data")

ROWS = (
    Row(key="floats", title="5 floats, batch 1", work="floats", rivals=PYTHON_RIVALS),
    Row(key="small-images", title="28x28 images, batch 100", work="small-images", rivals=PYTHON_RIVALS),
    Row(key="large-batches", title="3x224x224 float32, batch 64 (38 MB)", work="large-batches", rivals=ALL_RIVALS),
    Row(
        key="large-batches-copied",
        title="3x224x224 float32, batch 64, each batch copied",
        work="large-batches",
        use="copy",
    ),
    Row(
        key="jpeg",
        title="JPEG decode + random resized crop + normalise, batch 64",
        work="jpeg",
        rivals=(*ALL_RIVALS, "dali"),
    ),
    Row(key="wait", title="5 ms wait per sample, batch 16", work="wait", waits=True, rivals=PYTHON_RIVALS),
    Row(
        key="skewed-wait",
        title="log-normal wait per sample, mean 3 ms, batch 16, in order",
        work="skewed-wait",
        long=True,
        waits=True,
        rivals=PYTHON_RIVALS,
    ),
    Row(
        key="jpeg-step",
        title="JPEG, batch 64, under a step of 30 ms",
        work="jpeg",
        step_s=0.030,
        rivals=(*ALL_RIVALS, "dali"),
    ),
    Row(
        key="shift",
        title="1, then 8, then 2 ms wait per sample, batch 16, under a step of 20 ms",
        work="shifting-wait",
        step_s=0.020,
        counted=True,
        waits=True,
        rivals=PYTHON_RIVALS,
    ),
    Row(
        key="slow-shards",
        title="shards of 50 batches as slow as each other, mean wait 4 ms, batch 16, under a step of 20 ms",
        work="slow-shards",
        step_s=0.020,
        counted=True,
        waits=True,
    ),
    Row(
        key="tokens",
        title="Hugging Face tokenizers, 16 documents a sample, batch 8",
        work="tokens",
    ),
    Row(key="http", title="64 KB files over HTTP, 12 ms to the answer, batch 16", work="http", waits=True),
    Row(key="video", title="MJPG video, 4 frames at a random place, batch 8", work="video"),
    Row(key="text", title="text of 1 KB into words in Python, batch 64", work="text"),
    Row(key="audio", title="wave files of 2 s resampled, batch 16", work="audio"),
    Row(key="first-batch", title="time to the first batch, in a process of 256 MB", work="few-floats", kind="start"),
    Row(key="remote-floats", title="remote, 5 floats, batch 1", work="floats", kind="remote", rivals=("ray-data",)),
    Row(
        key="remote-large",
        title="remote, 3x224x224 float32, batch 64 (38 MB)",
        work="large-batches",
        kind="remote",
        rivals=("ray-data",),
    ),
)
BY_KEY = {row.key: row for row in ROWS}
