"""dpex's own options, beside torch's: one frozen value that validates itself.

Every message names the value it got and what would be accepted.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from dpex.autotune.config import AutotuneConfig
from dpex.core.seeding import SEEDINGS
from dpex.errors import OptionError

Seeding = Literal["worker", "batch"]
_FILES = (
    ("metrics_certfile", "a certificate's file"),
    ("metrics_keyfile", "a private key's file"),
    ("metrics_client_cafile", "an authority's certificate file"),
)
_ADDRESS = re.compile(r"^(auto|local|(ray://)?[^\s:/]+:\d{1,5})$")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked of dpex beyond torch's own arguments (see `dpex.DpexDataLoader` for their meaning)."""

    distribute_mode: bool | Literal["auto"] = False
    head_address: str = "auto"
    seeding: Seeding = "worker"
    memory_budget: int | None = None
    worker_resources: Mapping[str, Any] | None = None
    runtime_env: Mapping[str, Any] | None = None
    local_engine: Literal["dpex", "torch"] = "dpex"
    autotune: AutotuneConfig | Literal[False] | None = None
    thread_safe: bool | None = None
    name: str | None = None
    metrics_port: int | None = None
    metrics_host: str = "127.0.0.1"
    metrics_dir: str | None = None
    metrics_certfile: str | None = None
    metrics_keyfile: str | None = None
    metrics_client_cafile: str | None = None

    def __post_init__(self) -> None:
        _require(
            self.distribute_mode in (True, False, "auto"),
            f"distribute_mode={self.distribute_mode!r}: give False (this machine), True (the Ray cluster) or 'auto'",
        )
        _require(
            isinstance(self.head_address, str) and bool(_ADDRESS.fullmatch(self.head_address)),
            f"head_address={self.head_address!r}: give 'auto', 'local' or 'host:port'",
        )
        _require(self.seeding in SEEDINGS, f"seeding={self.seeding!r}: give 'worker' or 'batch'")
        budget = self.memory_budget
        _require(
            budget is None or (isinstance(budget, int) and not isinstance(budget, bool) and budget > 0),
            f"memory_budget={budget!r}: give a positive number of bytes, or None for no limit",
        )
        _require(self.local_engine in ("dpex", "torch"), f"local_engine={self.local_engine!r}: give 'dpex' or 'torch'")
        _require(
            self.autotune is None or self.autotune is False or isinstance(self.autotune, AutotuneConfig),
            f"autotune={self.autotune!r}: give an AutotuneConfig(...), False for no tuning, or None to tune "
            "num_workers='auto' with the defaults",
        )
        _require(
            not (isinstance(self.autotune, AutotuneConfig) and self.seeding == "worker"),
            "autotune=AutotuneConfig(...) changes the number of workers, and seeding='worker' ties the random state to "
            "it: give seeding='batch' (the same batches with any number of workers), or autotune=False",
        )
        _require(
            self.thread_safe in (None, True, False),
            f"thread_safe={self.thread_safe!r}: give True, False, or None to go by the dataset's dpex_thread_safe",
        )
        _require(
            not (self.thread_safe and self.seeding == "worker"),
            "thread_safe=True lets workers share a process, whose random state seeding='worker' gives to one of them: "
            "give seeding='batch'",
        )
        _require(
            not (self.thread_safe and self.local_engine == "torch"),
            "thread_safe=True does nothing with local_engine='torch', whose workers are processes: give one of the two",
        )
        for name in ("worker_resources", "runtime_env"):
            value = getattr(self, name)
            _require(value is None or isinstance(value, Mapping), f"{name}={value!r}: give a mapping or None")
        self._check_metrics()

    def _check_metrics(self) -> None:
        port = self.metrics_port
        _require(
            port is None or (isinstance(port, int) and not isinstance(port, bool) and 0 <= port <= 65535),
            f"metrics_port={port!r}: give a port from 1 to 65535, 0 for one that is free, or None for no metrics",
        )
        _require(
            isinstance(self.metrics_host, str) and bool(self.metrics_host),
            f"metrics_host={self.metrics_host!r}: give an address of this machine, such as '127.0.0.1' or '0.0.0.0'",
        )
        for name, what in (("name", "a name"), ("metrics_dir", "a directory"), *_FILES):
            value = getattr(self, name)
            _require(
                value is None or (isinstance(value, str) and bool(value)), f"{name}={value!r}: give {what} or None"
            )
        certfile, keyfile, cafile = (getattr(self, name) for name, _ in _FILES)
        _require(
            (certfile is None) == (keyfile is None),
            f"metrics_certfile={certfile!r}, metrics_keyfile={keyfile!r}: give both for TLS, or neither",
        )
        _require(
            cafile is None or certfile is not None,
            f"metrics_client_cafile={cafile!r}: give metrics_certfile and metrics_keyfile too, as it needs TLS",
        )


def resolve_seeding(seeding: str | None, auto: bool) -> Seeding:
    """The default is ``"worker"`` for a fixed number of workers, ``"batch"`` for ``"auto"`` and what else needs it."""
    if seeding is None:
        return "batch" if auto else "worker"
    _require(seeding in SEEDINGS, f"seeding={seeding!r}: give 'worker', 'batch' or None")
    return seeding  # type: ignore[return-value]


def check_count(name: str, value: int | None, least: int = 0) -> None:
    """Raise `OptionError` unless ``value`` is None or an int of at least ``least``."""
    ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
    _require(ok, f"{name}={value!r}: give a whole number of at least {least}, or None to leave it as it is")
