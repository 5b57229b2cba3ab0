"""What ``dpex run`` and ``dpex diagnose`` were told, and what that makes of a loader of the script. PURE.

The options travel to every Python process that the script starts, as JSON in the environment.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from dpex.options import WorkerConfig

VARIABLE = "DPEX_RUN"

Count = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """See ``dpex run --help``. memory_budget: bytes. quiet: nothing is said at the end.

    prefix, root: of the Python these options are for, and of the folder its dpex is in.
    """

    num_workers: int | Literal["auto", "keep"] = "auto"
    also_in_process: bool = False
    distribute_mode: bool | Literal["auto"] = False
    head_address: str = "auto"
    memory_budget: int | None = None
    metrics_port: int | None = None
    quiet: bool = False
    prefix: str = ""
    root: str = ""

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RunOptions:
        """What `to_text` made."""
        return cls(**json.loads(text))

    def workers(self, given: int, *, iterable: bool) -> Count:
        """Workers of a loader that the script gives so many.

        A stream keeps its number, which decides what its dataset yields where.
        """
        if self.num_workers == "keep" or iterable or (given == 0 and not self.also_in_process):
            return given
        return self.num_workers

    def loader_options(self, workers: Count) -> dict[str, Any]:
        """Keywords of `dpex.DpexDataLoader` beyond torch's."""
        return {
            "distribute_mode": self.distribute_mode if workers else False,
            "head_address": self.head_address,
            "worker_config": WorkerConfig(memory_budget=self.memory_budget),
            "metrics_port": self.metrics_port,
        }


@dataclass(frozen=True, kw_only=True)
class DiagnoseOptions:
    """See ``dpex diagnose --help``. html, json: names of files. full: all tables are printed. again: words after
    ``dpex run`` for the same script.

    prefix, root: as in `RunOptions`.
    """

    html: str | None = None
    json: str | None = None
    full: bool = False
    probe: bool = True
    again: tuple[str, ...] = ()
    prefix: str = ""
    root: str = ""

    def to_text(self) -> str:
        """For the environment."""
        return json.dumps({"command": "diagnose"} | asdict(self))


def read(text: str) -> RunOptions | DiagnoseOptions:
    """What either's ``to_text`` made."""
    values = json.loads(text)
    if values.pop("command", "run") == "run":
        return RunOptions(**values)
    return DiagnoseOptions(**(values | {"again": tuple(values["again"])}))
