"""Options of ``dpex run`` and ``dpex diagnose``, which travel to the processes of a script as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from dpex.options import WorkerConfig

Count = int | Literal["auto"]


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """Options as ``dpex run --help`` and ``dpex diagnose --help`` explain them."""

    command: Literal["run", "diagnose"] = "run"
    num_workers: int | Literal["auto", "keep"] = "auto"
    also_in_process: bool = False
    loader: Mapping[str, Any] = field(default_factory=dict)
    """Options of `dpex.DpexDataLoader` and of its `WorkerConfig`, by name."""
    html: str | None = None
    json: str | None = None
    """The file names of the report, in HTML and in JSON."""
    full: bool = False
    """True for a report with all tables."""
    quiet: bool = False
    """True for no output at the end."""
    script: tuple[str, ...] = ()
    """The script and its arguments, for the command in the report's advice."""
    prefix: str = ""
    """``sys.prefix`` of the Python to which these options apply. Other Pythons ignore them."""
    root: str = ""
    """The folder that contains dpex."""

    def to_text(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> RunOptions:
        """Return the options that `to_text` wrote."""
        values = json.loads(text)
        return cls(**(values | {"script": tuple(values["script"])}))

    def workers(self, given: int, *, iterable: bool) -> Count:
        """Return the number of workers for a loader that has ``given`` workers in the script.

        An iterable dataset keeps ``given``, because the number determines the samples of each worker.
        """
        if self.num_workers == "keep" or iterable or (given == 0 and not self.also_in_process):
            return given
        return self.num_workers

    def loader_options(self, workers: Count) -> dict[str, Any]:
        """Return dpex's own keyword arguments of `dpex.DpexDataLoader`; without workers, none for a cluster."""
        places = () if workers else ("distribute_mode", "head_address")
        found = {name: value for name, value in self.loader.items() if name not in places}
        return {**found, "worker_config": WorkerConfig(memory_budget=found.pop("memory_budget", None))}
