"""The contestants by name: who makes the batches, with how many workers, and with which of its own settings.

Pure; `loaders` makes them. Nothing is tuned for one side: everybody has the same dataset, batches and consumer, and
its own defaults but for what its label says.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Workers = int | Literal["auto"]

LOCAL = ("torch", "dpex")
REMOTE = ("actors", "dpex-remote")
THREADED = ("spdl", "grain-threads", "nodes-threads", "dali")
RIVALS = (*THREADED, "grain-processes", "nodes-processes", "tf.data", "ray-data")
NAMES = {
    "dpex-remote": "dpex",
    "actors": "actor calls",
    "ray-data": "Ray Data",
    "spdl": "SPDL",
    "dali": "DALI",
    "grain-threads": "Grain",
    "grain-processes": "Grain",
    "nodes-threads": "torchdata.nodes",
    "nodes-processes": "torchdata.nodes",
}


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a comparison.

    engine: "torch" and "dpex" load on this machine, "dpex-remote" on a second raylet; "actors" is one actor call per
        batch there; the others are the rivals.
    workers: processes, or threads where the engine has those; "auto": dpex's controller, or tf.data's.
    seeding: dpex's, where it is not the default. prefetch: torch's `prefetch_factor`, or what "actors" keeps in
        flight per actor.
    """

    engine: str
    workers: Workers
    seeding: Literal["worker", "batch"] | None = None
    prefetch: int | None = None

    @property
    def label(self) -> str:
        """For people."""
        parts = [NAMES.get(self.engine, self.engine), self._workers]
        if self.seeding:
            parts.append(f'seeding="{self.seeding}"')
        if self.prefetch:
            parts.append(f"prefetch {self.prefetch}" if self.engine == "torch" else f"{self.prefetch} ahead")
        return ", ".join(parts)

    @property
    def _workers(self) -> str:
        unit = "thread" if self.engine in (*THREADED, "tf.data") else "worker"
        if self.workers == "auto":
            return "auto"
        return f"{self.workers} {unit}{'' if self.workers == 1 else 's'}"

    @property
    def key(self) -> str:
        """For files and the command line, such as "dpex:2" or "torch:8:prefetch=4"."""
        options = [f"{name}={value}" for name, value in self.as_dict().items() if name not in ("engine", "workers")]
        return ":".join([self.engine, str(self.workers), *options])

    def as_dict(self) -> dict[str, Any]:
        """Its fields, those left at their defaults left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> "Contestant":
        """From what `as_dict` gave."""
        return cls(**fields)


AUTO = Contestant(engine="dpex", workers="auto")
