"""The options of dpex beside those of torch: one frozen value that validates itself.

Every message names the value it got and what would be accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import index
from typing import Any, Literal, SupportsIndex

from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError
from dpex.schedule.sample_policy import OnSampleError
from dpex.schedule.seeding import SEEDINGS

Seeding = Literal["worker", "batch"]
Compression = Literal["zstd"]
DEVICE_BUDGET_BYTES = 512 << 20
"""For batches that wait on the device: two of 256 MB, which is 400 images of 224 by 224 by 3 floats each."""
SHARE_BYTES = 1 << 30
"""For batches that a late training may still want: those of a minute, where 3 of 5 MB are made in a second."""
_ADDRESS = re.compile(r"^(auto|local|(ray://)?[^\s:/]+:\d{1,5})$")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _is_quantity(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_BYTES = re.compile(r"(\d+(?:\.\d+)?) ?([KMGT]?)i?B?", re.IGNORECASE)


def byte_count(value: Any) -> Any:
    """Return the number of bytes that a text such as "2G", "1.5GiB" or "500 MB" names, in powers of 1024.

    Any other value is returned unchanged, so that the check of the number can refuse it.
    """
    found = _BYTES.fullmatch(value) if isinstance(value, str) else None
    return value if found is None else int(float(found[1]) * _UNITS[found[2].upper()])


def _is_mapping_to(is_right: Callable[[Any], bool], value: Any) -> bool:
    """Whether ``value`` maps strings to what ``is_right``."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(key, str) and is_right(item) for key, item in value.items())


_QUANTITY = "a number of at least 0"
_RAY_REMOTE_ARGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_cpus": (_is_quantity, _QUANTITY),
    "num_gpus": (_is_quantity, _QUANTITY),
    "memory": (_is_quantity, f"{_QUANTITY}, in bytes"),
    "resources": (
        lambda value: _is_mapping_to(_is_quantity, value) and value.keys().isdisjoint(("CPU", "GPU")),
        "a dict of custom resources, such as {'ssd': 1}; CPUs and GPUs are 'num_cpus' and 'num_gpus'",
    ),
    "accelerator_type": (_is_text, "a str, such as 'T4'"),
    "label_selector": (partial(_is_mapping_to, _is_text), "a dict of labels, such as {'region': 'us-west'}"),
    "scheduling_strategy": (
        lambda value: value in ("DEFAULT", "SPREAD") or type(value).__module__.startswith("ray."),
        "'DEFAULT', 'SPREAD' or a strategy of ray.util.scheduling_strategies",
    ),
    "runtime_env": (partial(_is_mapping_to, lambda _: True), "a dict, such as {'pip': ['pillow']}"),
}
"""The arguments of ``ray.remote`` that `DpexDataLoader` takes: what each must be, as a test and in words."""
_INSTEAD = {"CPU": "num_cpus", "GPU": "num_gpus"}


def _check_ray_remote_args(given: Any) -> None:
    _require(
        given is None or isinstance(given, Mapping),
        f"ray_remote_args={given!r}: give a dict of arguments of ray.remote, such as {{'num_cpus': 2}}, or None",
    )
    for name, value in (given or {}).items():
        known = ", ".join(map(repr, _RAY_REMOTE_ARGS))
        instead = f"give {_INSTEAD[name]!r}" if name in _INSTEAD else f"leave it out, or give one of {known}"
        _require(
            name in _RAY_REMOTE_ARGS,
            f"ray_remote_args has the key {name!r}: {instead}. Custom resources belong in 'resources', and dpex itself "
            "decides how its workers are named, restarted and called",
        )
        is_right, what = _RAY_REMOTE_ARGS[name]
        _require(is_right(value), f"ray_remote_args[{name!r}]={value!r}: give {what}")


def _is_port(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= 65535


@dataclass(frozen=True, kw_only=True)
class TLSConfig:
    """The PEM files with which metrics are served by TLS.

    Args:
        certfile: The certificate, and those of the authorities between it and the root.
        keyfile: Its private key.
        client_cafile: The certificate of an authority; only clients that have a certificate of it are served. None: all
            clients are.

    Raises:
        OptionError: A value is no file's name. It is a ValueError.
    """

    certfile: str
    keyfile: str
    client_cafile: str | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_left_out = value is None and name == "client_cafile"
            _require(
                is_left_out or (_is_text(value) and bool(value)), f"TLSConfig({name}={value!r}): give a PEM file's name"
            )


@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """Where the live page and the metrics for Prometheus are served, and to whom.

    Args:
        port: The port; 0, or where another process has the port: one that is free. None: ``$DPEX_METRICS_PORT``, else
            one that is free.
        host: The address to serve on; by default only this machine can reach it.
        directory: Where this process announces itself to Prometheus (``file_sd``) and ``dpex top``. None:
            ``$DPEX_METRICS_DIR``, else ``dpex`` in ``$XDG_RUNTIME_DIR``, else ``dpex-<uid>`` in the directory for
            temporary files, made for this user alone.
        tls: The files for TLS. None: the endpoint is served without it.
        allowed_hosts: Further names under which the endpoint may be asked where it is served without TLS;
            ``.example.org`` is that domain and all in it, ``*`` is any name. None: those of
            ``$DPEX_METRICS_ALLOWED_HOSTS``, with commas between.

    Raises:
        OptionError: A value makes no sense. It is a ValueError.

    Examples:
        >>> from dpex import DpexDataLoader, MetricsConfig
        >>> loader = DpexDataLoader([1, 2, 3], metrics=MetricsConfig(port=0, allowed_hosts=["train.example.org"]))
        >>> try:
        ...     MetricsConfig(port=70000)
        ... except ValueError as error:
        ...     print(error)
        MetricsConfig(port=70000): give a port from 1 to 65535, 0 for one that is free, or None
    """

    port: int | None = None
    host: str = "127.0.0.1"
    directory: str | None = None
    tls: TLSConfig | None = None
    allowed_hosts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        directory, hosts = self.directory, self.allowed_hosts
        _require(
            self.port is None or _is_port(self.port),
            f"MetricsConfig(port={self.port!r}): give a port from 1 to 65535, 0 for one that is free, or None",
        )
        _require(
            _is_text(self.host) and bool(self.host),
            f"MetricsConfig(host={self.host!r}): give an address of this machine, such as '127.0.0.1' or '0.0.0.0'",
        )
        _require(
            directory is None or (_is_text(directory) and bool(directory)),
            f"MetricsConfig(directory={directory!r}): give a directory or None",
        )
        _require(
            self.tls is None or isinstance(self.tls, TLSConfig),
            f"MetricsConfig(tls={self.tls!r}): give a TLSConfig(certfile=..., keyfile=...) or None",
        )
        _require(
            hosts is None or (isinstance(hosts, (list, tuple)) and all(map(_is_text, hosts))),
            f"MetricsConfig(allowed_hosts={hosts!r}): give a list of names, such as ['train.example.org'], or None",
        )


@dataclass(frozen=True, kw_only=True)
class Options:
    """What the user asked of dpex beyond torch's own arguments (see `dpex.DpexDataLoader` for their meaning)."""

    distribute_mode: bool | Literal["auto"] = False
    head_address: str = "auto"
    seeding: Seeding = "worker"
    memory_budget: int | str | None = None
    ray_remote_args: Mapping[str, Any] | None = None
    compression: Compression | None = None
    local_engine: Literal["dpex", "torch"] = "dpex"
    autotune: AutotuneConfig | Literal[False] | None = None
    share: str | None = None
    share_bytes: int = SHARE_BYTES
    name: str | None = None
    metrics_port: int | None = None
    metrics: MetricsConfig | None = None
    device_budget_bytes: int = DEVICE_BUDGET_BYTES
    snapshot_every_n_steps: int | None = None
    on_sample_error: OnSampleError = "raise"
    max_sample_errors: float = 0.01
    sample_timeout_s: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_budget", byte_count(self.memory_budget))
        self._check_each_alone()
        self._check_autotune()
        check_count("snapshot_every_n_steps", self.snapshot_every_n_steps)
        _check_ray_remote_args(self.ray_remote_args)
        self._check_samples()
        self._check_share()
        self._check_metrics()

    def _check_each_alone(self) -> None:
        _require(
            self.distribute_mode in (True, False, "auto"),
            f"distribute_mode={self.distribute_mode!r}: give False (this machine), True (the Ray cluster) or 'auto'",
        )
        _require(
            isinstance(self.head_address, str) and bool(_ADDRESS.fullmatch(self.head_address)),
            f"head_address={self.head_address!r}: give 'auto', 'local', 'host:port' or 'ray://host:port'",
        )
        _require(self.seeding in SEEDINGS, f"seeding={self.seeding!r}: give 'worker' or 'batch'")
        budget = self.memory_budget
        _require(
            budget is None or _is_size(budget),
            f"memory_budget={budget!r}: give a positive number of bytes, such as 2_000_000_000 or '2G', or None for no "
            "limit",
        )
        _require(
            _is_size(self.device_budget_bytes),
            f"device_budget_bytes={self.device_budget_bytes!r}: give a positive number of bytes",
        )
        _require(
            self.compression in (None, "zstd"),
            f"compression={self.compression!r}: give 'zstd', or None to send batches as they are",
        )
        _require(self.local_engine in ("dpex", "torch"), f"local_engine={self.local_engine!r}: give 'dpex' or 'torch'")

    def _check_autotune(self) -> None:
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

    def _check_samples(self) -> None:
        on_error, share, timeout_s = self.on_sample_error, self.max_sample_errors, self.sample_timeout_s
        _require(
            on_error in ("raise", "skip", "replace"),
            f"on_sample_error={on_error!r}: give 'raise', 'skip' or 'replace'",
        )
        _require(
            _is_quantity(share) and share <= 1, f"max_sample_errors={share!r}: give a share of the samples, from 0 to 1"
        )
        _require(
            timeout_s is None or (_is_quantity(timeout_s) and timeout_s > 0),
            f"sample_timeout_s={timeout_s!r}: give a positive number of seconds, or None for no limit",
        )
        if on_error == "raise" and timeout_s is None:
            return
        both = f"on_sample_error={on_error!r} with sample_timeout_s={timeout_s!r}"
        _require(
            self.local_engine == "dpex",
            f"{both} needs workers of dpex's own, and local_engine={self.local_engine!r} has PyTorch's: give one of "
            "the two",
        )
        _require(
            self.share is None,
            f"{both} beside share={self.share!r}: trainings that share batches get the errors of these as they are; "
            "give one of the two",
        )

    def _check_share(self) -> None:
        share = self.share
        _require(share is None or (_is_text(share) and bool(share)), f"share={share!r}: give a name or None")
        _require(_is_size(self.share_bytes), f"share_bytes={self.share_bytes!r}: give a positive number of bytes")
        if share is None:
            return
        _require(
            self.seeding == "batch",
            f"share={share!r} needs batches that do not depend on who makes them, and seeding={self.seeding!r} ties "
            "them to workers: give seeding='batch', or leave it out",
        )
        _require(
            self.distribute_mode is False,
            f"share={share!r} is for the trainings of one machine, and distribute_mode={self.distribute_mode!r} has "
            "workers elsewhere: give one of the two",
        )
        _require(
            self.local_engine == "dpex",
            f"share={share!r} needs workers of dpex's own, and local_engine={self.local_engine!r} has PyTorch's: give "
            "one of the two",
        )

    def _check_metrics(self) -> None:
        name, port, metrics = self.name, self.metrics_port, self.metrics
        _require(name is None or (_is_text(name) and bool(name)), f"name={name!r}: give a name or None")
        _require(
            port is None or _is_port(port),
            f"metrics_port={port!r}: give a port from 1 to 65535, 0 for one that is free, or None for no metrics",
        )
        _require(
            metrics is None or isinstance(metrics, MetricsConfig),
            f"metrics={metrics!r}: give a MetricsConfig(...) or None; for a port alone there is metrics_port",
        )
        _require(
            metrics is None or port is None,
            f"metrics_port={port!r} beside metrics={metrics!r}: give one of the two, such as metrics=MetricsConfig("
            f"port={port!r}, ...)",
        )


def resolve_seeding(seeding: str | None, auto: bool) -> Seeding:
    """The default is ``"worker"`` for a fixed number of workers, ``"batch"`` for ``"auto"`` and what else needs it."""
    if seeding is None:
        return "batch" if auto else "worker"
    _require(seeding in SEEDINGS, f"seeding={seeding!r}: give 'worker', 'batch' or None")
    return seeding  # type: ignore[return-value]


def complete(given: Mapping[str, Any], *, is_auto: bool) -> Options:
    """The options as they were given, by name; ``seeding`` may be None, and ``device`` is checked elsewhere.

    Raises:
        OptionError: One of them has a value that makes no sense.
    """
    needs_batch = is_auto or isinstance(given["autotune"], AutotuneConfig) or bool(given["share"])
    options = {name: value for name, value in given.items() if name not in ("device", "device_transform")}
    return Options(**{**options, "seeding": resolve_seeding(given["seeding"], needs_batch)})


def check_torchs(dataset: Any, num_workers: Any, prefetch_factor: Any) -> None:
    """Check what torch's constructor lets pass, or refuses without naming the value.

    Raises:
        OptionError: The dataset is missing, or a number is not whole or too small.
    """
    _require(
        dataset is not None,
        "dataset=None: give a map-style dataset (with __getitem__ and __len__) or an iterable one (with __iter__)",
    )
    _require(
        num_workers == "auto" or _is_whole(num_workers, least=0),
        f"num_workers={num_workers!r}: give a whole number of at least 0, or 'auto' for a number that dpex finds and "
        "changes while training runs",
    )
    _require(
        prefetch_factor is None or _is_whole(prefetch_factor, least=1),
        f"prefetch_factor={prefetch_factor!r}: give a whole number of at least 1 (batches per worker), or None for 2",
    )


def _is_whole(value: Any, *, least: int) -> bool:
    return isinstance(value, SupportsIndex) and index(value) >= least


def check_count(name: str, value: int | None, least: int = 0) -> None:
    """Raise `OptionError` unless ``value`` is None or an int of at least ``least``."""
    ok = value is None or (isinstance(value, int) and not isinstance(value, bool) and value >= least)
    _require(ok, f"{name}={value!r}: give a whole number of at least {least}, or None to leave it as it is")
