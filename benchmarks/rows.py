"""The rows of the table: which work, which contestants, and what is hoped for."""

from dataclasses import dataclass
from typing import Literal

from benchmarks.loaders import Contestant


@dataclass(frozen=True, kw_only=True)
class Target:
    """What dpex should reach beside the best of the others.

    kind: "ratio": rate over theirs, at least `bound`; "lead": the same, more than `bound`; "extra_ms":
    milliseconds more than theirs, at most `bound`; "extra_stall": points of stall more than theirs, at most
    `bound`.
    """

    kind: Literal["ratio", "lead", "extra_ms", "extra_stall"]
    bound: float

    def met(self, value: float) -> bool:
        if self.kind == "lead":
            return value > self.bound
        return value >= self.bound if self.kind == "ratio" else value <= self.bound

    def show(self, value: float) -> str:
        if self.kind in ("ratio", "lead"):
            return f"{value:.2f}x"
        return f"{value:+.1f} {'ms' if self.kind == 'extra_ms' else 'points'}"

    def __str__(self) -> str:
        return {
            "ratio": f"at least {self.bound:g}x",
            "lead": f"more than {self.bound:g}x",
            "extra_ms": f"at most {self.bound:+g} ms",
            "extra_stall": f"a stall of at most {self.bound:+g} points",
        }[self.kind]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table.

    warm_up: batches not counted. count: batches counted, where both sides must take the same ones; else those
    of the window. remote_cpus: processors of the second raylet (0: no cluster).
    """

    key: str
    title: str
    work: str
    contestants: tuple[Contestant, ...]
    target: Target
    quantity: Literal["rate", "first-batch"] = "rate"
    warm_up: int = 20
    count: int | None = None
    remote_cpus: int = 0


def both(workers: int, *, seeding: Literal["worker", "batch"] | None = None) -> tuple[Contestant, ...]:
    """torch and dpex with the same number of workers."""
    torch = Contestant(engine="torch", workers=workers)
    return torch, Contestant(engine="dpex", workers=workers, seeding=seeding)


def limit(cores: int = 2) -> Contestant:
    return Contestant(engine="bare", workers=cores)


def remote(workers: int, ahead: int) -> tuple[Contestant, ...]:
    """Hand-written actors and dpex's remote lane."""
    actors = Contestant(engine="actors", workers=workers, ahead=ahead)
    return actors, Contestant(engine="dpex-remote", workers=workers)


NOT_SLOWER = Target(kind="ratio", bound=0.98)
"""As fast, but for 2 % that two runs of the same program differ by."""

ROWS = (
    Row(
        key="floats",
        title="5 floats, batch 1",
        work="floats",
        contestants=both(2),
        target=Target(kind="ratio", bound=20),
        warm_up=1_000,
    ),
    Row(
        key="small-images",
        title="28x28 images, batch 100",
        work="small-images",
        contestants=both(2),
        target=Target(kind="ratio", bound=4),
        warm_up=200,
    ),
    Row(
        key="large-batches",
        title="3x224x224 float32, batch 64 (38 MB)",
        work="large-batches",
        contestants=(*both(2), limit()),
        target=Target(kind="ratio", bound=2.5),
    ),
    Row(
        key="in-process",
        title="the same, in the trainer's process",
        work="large-batches",
        contestants=both(0),
        target=Target(kind="ratio", bound=2),
    ),
    Row(
        key="jpeg",
        title="JPEG decode + random resized crop + normalise, batch 64",
        work="jpeg",
        contestants=(
            *(Contestant(engine="torch", workers=count) for count in (0, 1, 2, 4)),
            Contestant(engine="dpex", workers=2),
            limit(),
        ),
        target=Target(kind="ratio", bound=1.25),
        warm_up=8,
    ),
    Row(
        key="wait",
        title="5 ms wait per sample, batch 16, 32 workers",
        work="wait",
        contestants=both(32),
        target=NOT_SLOWER,
        warm_up=100,
    ),
    Row(
        key="skewed-wait",
        title="log-normal wait per sample, mean 3 ms, batch 16, 32 workers, in order",
        work="skewed-wait",
        contestants=both(32, seeding="batch"),
        target=Target(kind="ratio", bound=1.3),
        warm_up=100,
        count=1_200,
    ),
    Row(
        key="first-batch",
        title="time to the first batch, 2 workers",
        work="few-floats",
        contestants=both(2),
        target=Target(kind="extra_ms", bound=20),
        quantity="first-batch",
    ),
    Row(
        key="remote-floats",
        title="remote lane, 5 floats, batch 1",
        work="floats",
        contestants=remote(2, ahead=16),
        target=Target(kind="ratio", bound=10),
        warm_up=1_000,
        remote_cpus=2,
    ),
    Row(
        key="remote-large",
        title="remote lane, 3x224x224 float32, batch 64 (38 MB)",
        work="large-batches",
        contestants=remote(2, ahead=2),
        target=Target(kind="ratio", bound=2),
        remote_cpus=2,
    ),
)
