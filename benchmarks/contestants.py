"""The contestants by name: who makes the batches, with how many workers, and with which of its own settings.

Pure; `measure` makes their loaders. Nothing is tuned for one side: everybody has the same dataset, batches and
consumer, and its own defaults but for what its label says.
"""

from dataclasses import asdict, dataclass
from typing import Any, Literal

Workers = int | Literal["auto"]

LOCAL = ("torch", "dpex")
THREADED = ("spdl", "grain-threads", "nodes-threads", "dali", "tf.data")
RIVALS = (*THREADED, "grain-processes", "nodes-processes", "webdataset", "ray-data", "litdata")
NAMES = {
    "base": "dpex of the base",
    "dpex-remote": "dpex",
    "actors": "actor calls",
    "limit": "one batch again and again",
    "ray-data": "Ray Data",
    "spdl": "SPDL",
    "dali": "DALI",
    "grain-threads": "Grain",
    "grain-processes": "Grain",
    "nodes-threads": "torchdata.nodes",
    "nodes-processes": "torchdata.nodes",
    "litdata": "LitData, raw files",
}


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """One side of a comparison.

    engine: "torch" and "dpex" load on this machine, "base" is the dpex of another checkout; "dpex-remote" loads on a
        second raylet, "actors" is one actor call per batch there; "limit" uses one batch again and again; the others
        are the rivals.
    workers: processes, or threads where the engine has those; "auto": dpex's law, or tf.data's.
    seeding: dpex's, where it is not the default. prefetch: torch's `prefetch_factor`, or what "actors" keeps in
        flight per actor. nodes: further Ray nodes on this machine, where each machine stands for one of two CPUs.
    form: the asynchronous form of the row's dataset, by its name in `Work.forms`; None: the synchronous dataset.
    """

    engine: str
    workers: Workers
    seeding: Literal["worker", "batch"] | None = None
    prefetch: int | None = None
    nodes: int | None = None
    form: str | None = None

    @property
    def label(self) -> str:
        """For people."""
        parts = [NAMES.get(self.engine, self.engine), *([] if self.engine == "limit" else [self._workers])]
        if self.form:
            parts.append(self.form)
        if self.seeding:
            parts.append(f'seeding="{self.seeding}"')
        if self.prefetch:
            parts.append(f"prefetch {self.prefetch}" if self.engine in LOCAL else f"{self.prefetch} ahead")
        if self.nodes:
            parts.append(f"{self.nodes} further node{'' if self.nodes == 1 else 's'}")
        return ", ".join(parts)

    @property
    def _workers(self) -> str:
        unit = "worker" if self.engine not in THREADED else "task" if self.form else "thread"
        if self.workers == "auto":
            return "auto"
        return f"{self.workers} {unit}{'' if self.workers == 1 else 's'}"

    @property
    def key(self) -> str:
        """For files and the command line, such as "dpex:2" or "torch:8:prefetch=4"."""
        options = [f"{name}={value}" for name, value in self.as_dict().items() if name not in ("engine", "workers")]
        return ":".join([self.engine, str(self.workers), *options])

    @classmethod
    def from_key(cls, key: str) -> "Contestant":
        """From what `key` is."""
        engine, workers, *options = key.split(":")
        fields = dict(option.split("=") for option in options)
        given: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in fields.items()}
        return cls(engine=engine, workers="auto" if workers == "auto" else int(workers), **given)

    def as_dict(self) -> dict[str, Any]:
        """Its fields, those left at their defaults left out."""
        return {name: value for name, value in asdict(self).items() if value is not None}


AUTO = Contestant(engine="dpex", workers="auto")
LIMIT = Contestant(engine="limit", workers=0)
