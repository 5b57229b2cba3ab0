"""The rows: which work, under which consumer, and who takes part.

Everybody is measured in the same rounds: torch and dpex with several counts of workers, dpex's "auto", and the
rivals where they are asked for. A row's name says what is not a default.
"""

from dataclasses import dataclass
from typing import Literal

from benchmarks.consumer import Use
from benchmarks.contestants import AUTO, LIMIT, LOCAL, RIVALS, Contestant

TRAINING_COUNTS = (1, 2, 4)
WAITING_COUNT, WAITING_COUNT_UNDER_STEP = 64, 8
"""Workers at which torch and dpex were best where workers wait, in a sweep of nine counts (2026-11-25). There both
also have other prefetch factors than 2."""
PREFETCHES = (4, 16)
ACTORS_AHEAD = (2, 4, 16)
NODES = (0, 1, 2, 4)
"""Further nodes of a training."""
MACHINE_CPUS = 2
"""CPUs of this machine and of each further node in such a training, where each picture is a wait."""
NODES_LONGER = 2.0
"""Windows are longer by this where nodes take part: starting what runs there takes seconds on few cores."""

Kind = Literal["local", "start", "remote", "loaders", "training", "readme"]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One row.

    kind: "local": torch and dpex with many numbers of workers. "start": the first
    batch. "remote": workers on a second raylet. "loaders": the contestants named in ``plan``, torch, dpex and rivals,
    with their memory, and asynchronous forms of the dataset. "training": a whole training, which with a GPU trains
    ResNet-50. "readme": PyTorch with a sweep of its workers beside "auto", each with the same window, and the
    asynchronous forms named in ``forms``.
    step_s: what the consumer waits after each batch. counted: everybody takes the same number of batches, as many as
    the step allows in the window, in place of the same time: where the cost of a batch depends on its number. long:
    everybody has as long a window as "auto": where a few slow samples decide how far a short one reaches.
    waits: workers wait rather than compute, so more of them than cores pay, and dpex is measured with
    `seeding="batch"` too, beside its default, unless a step hides the difference.
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
    plan: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()

    @property
    def same_length(self) -> bool:
        """Whether everybody has as many batches, or as many seconds, as "auto", so that whole courses compare."""
        return self.counted or self.long or self.kind in ("loaders", "training", "readme")

    def count(self, window_s: float) -> int | None:
        """Batches of a measurement of that length, in thirds; None: as many as fit."""
        if self.kind == "start":
            return 1
        return 3 * max(1, round(window_s / self.step_s / 3)) if self.counted else None

    def contestants(self, cores: int, *, rivals: bool = False) -> tuple[Contestant, ...]:
        """Who takes part on a machine with so many cores."""
        found = tuple(_planned(self, cores))
        return tuple(one for one in found if rivals or one.engine not in RIVALS)


def _planned(row: Row, cores: int) -> list[Contestant]:
    if row.kind == "loaders":
        return [Contestant.from_key(key) for key in row.plan]
    if row.kind == "remote":
        actors = [Contestant(engine="actors", workers=cores, prefetch=ahead) for ahead in ACTORS_AHEAD]
        return [*actors, Contestant(engine="dpex-remote", workers=cores)]
    if row.kind == "start":
        return [*_fixed("torch", {0, cores}), *_fixed("dpex", {0, cores}), AUTO]
    if row.kind == "readme":
        return _readme(row, cores)
    return _trained(row, cores) if row.kind == "training" else _local(row, cores)


def _fixed(engine: str, counts: set[int]) -> list[Contestant]:
    return [Contestant(engine=engine, workers=count) for count in sorted(counts)]


def _local(row: Row, cores: int) -> list[Contestant]:
    """torch and dpex with the counts of workers that may be best for such a row, and "auto"."""
    if row.waits and row.step_s:
        counts = {cores, WAITING_COUNT_UNDER_STEP}
        return [*_fixed("torch", counts), *_fixed("dpex", counts), AUTO]
    if row.waits:
        counts = {cores, WAITING_COUNT}
        ahead = [Contestant(engine=e, workers=WAITING_COUNT, prefetch=factor) for e in LOCAL for factor in PREFETCHES]
        batch = [Contestant(engine="dpex", workers=count, seeding="batch") for count in sorted(counts)]
        return [*_fixed("torch", counts), *_fixed("dpex", counts), *ahead, *batch, AUTO]
    counts = {0, cores, 2 * cores}
    return [*_fixed("torch", counts), *_fixed("dpex", counts), AUTO]


def _readme(row: Row, cores: int) -> list[Contestant]:
    """torch with a sweep of its workers, and "auto" with each form of the dataset."""
    counts = {cores, 8 * cores, WAITING_COUNT} if row.waits else {0, cores, 2 * cores, 4 * cores}
    ahead = [Contestant(engine="torch", workers=WAITING_COUNT, prefetch=factor) for factor in PREFETCHES]
    forms = [Contestant(engine="dpex", workers="auto", form=form) for form in row.forms]
    return [*_fixed("torch", counts), *(ahead if row.waits else ()), AUTO, *forms]


def _trained(row: Row, cores: int) -> list[Contestant]:
    """torch with several numbers of workers, and "auto"; of pictures that are waits, with further nodes."""
    if row.waits:
        nodes = [Contestant(engine="dpex", workers="auto", nodes=count) for count in NODES]
        return [LIMIT, *_fixed("torch", set(range(MACHINE_CPUS + 1))), *nodes]
    return [LIMIT, *_fixed("torch", {*TRAINING_COUNTS, cores, 2 * cores}), AUTO]


WAITING_LOADERS = (
    *("torch:64:prefetch=4", "dpex:64", "dpex:auto"),
    *("spdl:64", "grain-threads:64", "nodes-threads:64"),
)
HTTP_LOADERS = (*WAITING_LOADERS, "spdl:32", "grain-threads:32", "nodes-threads:32")
SHIFTING_LOADERS = ("torch:8", "dpex:8", "dpex:auto", "spdl:8", "grain-threads:8", "nodes-threads:8", "ray-data:8")
LARGE_LOADERS = (
    *("torch:0", "torch:2", "dpex:0", "dpex:2", "dpex:auto", "tf.data:auto", "spdl:2", "grain-threads:2"),
    *("nodes-threads:2", "nodes-threads:8", "ray-data:2"),
)
ASYNC_LOADERS = (*WAITING_LOADERS, *(f"dpex:{count}:form=async" for count in (2, 3, "auto")), "spdl:64:form=async")
ASYNC_HTTP_LOADERS = (
    *(*HTTP_LOADERS, *(f"dpex:{count}:form={form}" for form in ("aiohttp", "fsspec") for count in (2, 3, "auto"))),
    *("spdl:16:form=aiohttp", "litdata:2", "litdata:4"),
)
JPEG_LOADERS = (
    *("torch:2", "torch:4", "dpex:2", "dpex:auto", "dali:2", "webdataset:2", "spdl:2", "spdl:4", "grain-threads:2"),
    *("nodes-threads:2", "nodes-processes:2", "ray-data:2"),
)

ROWS = (
    Row(key="floats", title="5 floats, batch 1", work="floats"),
    Row(key="small-images", title="28x28 images, batch 100", work="small-images"),
    Row(key="large-batches", title="3x224x224 float32, batch 64 (38 MB)", work="large-batches"),
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
    ),
    Row(key="wait", title="5 ms wait per sample, batch 16", work="wait", waits=True),
    Row(
        key="skewed-wait",
        title="log-normal wait per sample, mean 3 ms, batch 16, in order",
        work="skewed-wait",
        long=True,
        waits=True,
    ),
    Row(
        key="jpeg-step",
        title="JPEG, batch 64, under a step of 30 ms",
        work="jpeg",
        step_s=0.030,
    ),
    Row(
        key="shift",
        title="1, then 8, then 2 ms wait per sample, batch 16, under a step of 20 ms",
        work="shifting-wait",
        step_s=0.020,
        counted=True,
        waits=True,
    ),
    Row(
        key="slow-shards",
        title="shards of 50 batches as slow as each other, mean wait 4 ms, batch 16, under a step of 20 ms",
        work="slow-shards",
        step_s=0.020,
        counted=True,
        waits=True,
    ),
    Row(key="tokens", title="Hugging Face tokenizers, 16 documents a sample, batch 8", work="tokens"),
    Row(key="http", title="64 KB files over HTTP, 12 ms to the answer, batch 16", work="http", waits=True),
    Row(key="video", title="MJPG video, 4 frames at a random place, batch 8", work="video"),
    Row(key="text", title="text of 1 KB into words in Python, batch 64", work="text"),
    Row(key="audio", title="wave files of 2 s resampled, batch 16", work="audio"),
    Row(key="first-batch", title="time to the first batch, in a process of 256 MB", work="few-floats", kind="start"),
    Row(key="remote-floats", title="remote, 5 floats, batch 1", work="floats", kind="remote"),
    Row(
        key="remote-large",
        title="remote, 3x224x224 float32, batch 64 (38 MB)",
        work="large-batches",
        kind="remote",
    ),
    *(
        Row(key=f"loaders-{work}", title=title, work=work, kind="loaders", plan=plan)
        for work, title, plan in (
            ("wait", "5 ms wait per sample, batch 16", ASYNC_LOADERS),
            ("skewed-wait", "log-normal wait per sample, mean 3 ms, batch 16, in order", ASYNC_LOADERS),
            ("http", "64 KB files over HTTP, 12 ms to the answer, batch 16", ASYNC_HTTP_LOADERS),
        )
    ),
    Row(
        key="loaders-shift",
        title="1, then 8, then 2 ms wait per sample, batch 16, under a step of 20 ms",
        work="shifting-wait",
        kind="loaders",
        step_s=0.020,
        counted=True,
        plan=SHIFTING_LOADERS,
    ),
    Row(
        key="landscape",
        title="JPEG of 256x256 random pixels, decode + random resized crop + normalise, batch 32",
        work="random-jpeg",
        kind="loaders",
        plan=JPEG_LOADERS,
    ),
    Row(
        key="loaders-large",
        title="3x224x224 float32, batch 64 (38 MB)",
        work="large-batches",
        kind="loaders",
        plan=LARGE_LOADERS,
    ),
    Row(
        key="train-jpeg",
        title="JPEG decode, random resized crop, colour jitter, normalise",
        work="jitter",
        kind="training",
        step_s=0.050,
    ),
    Row(
        key="train-waits",
        title=f"a wait of 4 ms per image, {MACHINE_CPUS} workers per machine",
        work="waiting-images",
        kind="training",
        step_s=0.012,  # needs 11 workers: two of this machine and two each of four nodes are nearly enough
        waits=True,
    ),
    Row(
        key="readme-rows",
        title="a table in memory, one row of 5 numbers per batch",
        work="floats",
        kind="readme",
    ),
    Row(
        key="readme-photographs",
        title="photographs, decoded, cropped and normalised, batches of 64",
        work="jpeg",
        kind="readme",
    ),
    Row(
        key="readme-http",
        title="objects of 64 KB over HTTP, batches of 16",
        work="http",
        kind="readme",
        waits=True,
        forms=("aiohttp",),
    ),
    Row(
        key="readme-text",
        title="English text into tokens, batches of 128 KB",
        work="tokens",
        kind="readme",
    ),
)
BY_KEY = {row.key: row for row in ROWS}
