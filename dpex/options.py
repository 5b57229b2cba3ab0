"""The options of a loader beyond torch's arguments. Each is declared here once: name, type, default and check. PURE.

`LoaderOptions` names them all. Options that users choose together are the fields of one frozen value, which checks
itself; `checked` checks combinations. The constructor, its errors, rebuilt loaders and `dpex run` use these
declarations. Each message names the given value and the accepted ones.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from types import SimpleNamespace
from typing import Any, Literal

from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError
from dpex.hints import hinted
from dpex.measure.readable import byte_count
from dpex.schedule.sample_policy import SamplePolicy
from dpex.schedule.seeding import SEEDINGS

Seeding = Literal["worker", "batch"]
_ADDRESS = re.compile(r"^(auto|local|[^\s:/]+:\d{1,5})$")


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise OptionError(message)


def _require_field(config: Any, name: str, condition: bool, remedy: str) -> None:
    _require(condition, f"{type(config).__name__}({name}={getattr(config, name)!r}): give {remedy}")


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value)


def _is_whole(value: Any, least: int = 0, most: float = math.inf) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _is_quantity(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf


@hinted
@dataclass(frozen=True, kw_only=True)
class WorkerConfig:
    """Options of a loader's workers: the memory of their batches, shared batches, states.

    Args:
        memory_budget: The maximum number of bytes of batches in flight, as a number or as a text such as "2G" (powers
            of 1000) or "2GiB" (powers of 1024). A batch is in flight from its assignment to a worker until its
            delivery. Until it is finished, dpex assumes the size of the largest batch so far. Larger batches may exceed
            the limit, by two batches for each local worker, four for each remote worker, and the batches that a worker
            of an asynchronous dataset makes at the same time. A single batch may be larger than the limit. None: only
            the prefetch limits the batches in flight.
        share: The name under which trainings of this machine share batches, for example a sweep of learning rates. Each
            batch is made once for all trainings that read the same data with the same seeds and order. It needs
            ``seeding="batch"`` (then the default), a map-style dataset and workers. All trainings together have as many
            workers as the training that asks for the most.
        share_rank: The data-parallel rank of this process, as a number or as a dimension of a ``DeviceMesh``, such as
            ``mesh["dp"]``. Ranks of a job that give the same value share their batches. Use it for tensor- and
            context-parallel ranks, which read the same data. None: no two ranks of a job share.
        share_bytes: The maximum number of bytes of batches that are kept for slower trainings. None: 1 GiB, or 256 MiB
            with ``share_rank``.
        snapshot_every_n_steps: Batches between two states that a worker reports for ``state_dict()``, under
            ``seeding="worker"`` or for a dataset with a ``state_dict``. None: usually every quarter of a second. A
            worker then asks a dataset only after the first ``state_dict()`` or ``load_state_dict()`` of the loader.
        share_objects: True lets forked workers read the strings, numbers, tuples, lists, dicts and sets of the dataset
            without copying them, on CPython 3.12 or later. False: each worker copies the objects that it reads.
        concurrency: The maximum number of samples of an asynchronous dataset (`AsyncDataset`) that a worker,
            or the training process with ``num_workers=0``, loads at the same time. It bounds the open connections.

    Raises:
        OptionError: An option has an invalid value. It is a ValueError.

    Examples:
        >>> from dpex import DpexDataLoader, WorkerConfig
        >>> loader = DpexDataLoader([1, 2, 3], num_workers=2, worker_config=WorkerConfig(memory_budget="2G"))
        >>> loader.worker_config.memory_budget
        2000000000
    """

    memory_budget: int | str | None = None
    share: str | None = None
    share_rank: Any = None
    share_bytes: int | None = None
    snapshot_every_n_steps: int | None = None
    share_objects: bool = True
    concurrency: int = 64

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory_budget", byte_count(self.memory_budget))
        budget, every = self.memory_budget, self.snapshot_every_n_steps
        require = functools.partial(_require_field, self)
        require(
            "memory_budget",
            budget is None or _is_whole(budget, 1),
            "a positive number of bytes, such as 2_000_000_000 or '2G', or None for no limit",
        )
        require("share", self.share is None or _is_text(self.share), "a name or None")
        if hasattr(self.share_rank, "get_coordinate"):
            object.__setattr__(self, "share_rank", _coordinate(self.share_rank))
        is_rank = self.share_rank is None or (_is_whole(self.share_rank) and self.share is not None)
        require(
            "share_rank", is_rank, "a whole number of at least 0, or mesh['dp'] of a DeviceMesh, beside share='name'"
        )
        if self.share_bytes is None:
            object.__setattr__(self, "share_bytes", 1 << (30 if self.share_rank is None else 28))
        require("share_bytes", _is_whole(self.share_bytes, 1), "a positive number of bytes")
        require("concurrency", _is_whole(self.concurrency, 1), "a whole number of samples of at least 1")
        require("share_objects", isinstance(self.share_objects, bool), "True or False")
        require(
            "snapshot_every_n_steps", every is None or _is_whole(every, 1), "a number of batches of at least 1, or None"
        )


def _coordinate(mesh: Any) -> int:
    """Return this process's place in a `DeviceMesh` of one dimension."""
    place = mesh.get_coordinate()
    _require(
        place is not None and len(place) == 1,
        f"WorkerConfig(share_rank={mesh!r}): this process has the place {place} in that mesh; give one dimension of a "
        "mesh that this process is in, such as mesh['dp'], or the data-parallel rank as a number",
    )
    return int(place[0])


def _is_mapping_to(is_right: Callable[[Any], bool], value: Any) -> bool:
    """Return True if ``value`` maps strings to values for which ``is_right`` returns True."""
    if not isinstance(value, Mapping):
        return False
    return all(isinstance(key, str) and is_right(item) for key, item in value.items())


_QUANTITY = "a number of at least 0"
_RAY_REMOTE_ARGS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_cpus": (_is_quantity, _QUANTITY),
    "memory": (_is_quantity, f"{_QUANTITY}, in bytes"),
    "resources": (
        lambda value: _is_mapping_to(_is_quantity, value) and value.keys().isdisjoint(("CPU", "GPU")),
        "a dict of custom resources, such as {'ssd': 1}; CPUs are 'num_cpus', and workers have no GPU",
    ),
    "label_selector": (functools.partial(_is_mapping_to, _is_text), "a dict of labels, such as {'region': 'us-west'}"),
    "scheduling_strategy": (lambda value: value in ("DEFAULT", "SPREAD"), "'DEFAULT' or 'SPREAD'"),
    "runtime_env": (functools.partial(_is_mapping_to, lambda _: True), "a dict, such as {'pip': ['pillow']}"),
}
"""The arguments of ``ray.remote`` that `ClusterConfig` takes: the test of each, and its requirement in words."""


@hinted
@dataclass(frozen=True, kw_only=True)
class ClusterConfig:
    """Options of workers on a Ray cluster. `AutotuneConfig` limits their number.

    Args:
        ray_remote_args: Arguments of ``ray.remote`` for each worker, such as ``{"num_cpus": 2}``. Ray gives them their
            meaning: ``num_cpus`` (default 1), ``memory`` (bytes), ``resources``, ``label_selector``,
            ``scheduling_strategy`` (``"SPREAD"``, the default, or ``"DEFAULT"``) and ``runtime_env``. A worker must
            request more than 0 of some resource.

    Raises:
        OptionError: An option has an invalid value. It is a ValueError.
    """

    ray_remote_args: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        given = self.ray_remote_args
        _require_field(
            self,
            "ray_remote_args",
            given is None or isinstance(given, Mapping),
            "a dict of arguments of ray.remote, such as {'num_cpus': 2}, or None",
        )
        for name, value in (given or {}).items():
            known = ", ".join(map(repr, _RAY_REMOTE_ARGS))
            _require(
                name in _RAY_REMOTE_ARGS,
                f"ray_remote_args has the key {name!r}: leave it out, or give one of {known}. Custom "
                "resources belong in 'resources', and dpex itself decides how its workers are named, restarted and "
                "called",
            )
            is_right, requirement = _RAY_REMOTE_ARGS[name]
            _require(is_right(value), f"ray_remote_args[{name!r}]={value!r}: give {requirement}")
        needs = {"num_cpus": 1, **(given or {})}
        _require(
            bool(needs["num_cpus"] or needs.get("memory") or any(needs.get("resources", {}).values())),
            f"ray_remote_args={given!r}: give num_cpus, memory or resources above 0, by which Ray places a worker",
        )


@hinted
@dataclass(frozen=True, kw_only=True)
class DeviceConfig:
    """Options of batches that arrive on a ``device``.

    Args:
        transform: A function of a batch. It is called after the copy of the batch to the device, on the stream of that
            copy. For example, it converts ``uint8`` to floats, so that a quarter of the bytes crosses the bus, and
            crops or flips. Its random numbers depend only on the base seed, the epoch and the number of the batch; the
            generators of training, on host and device, keep their states. With the device ``"cpu"`` it runs on the
            host.
        budget_bytes: The maximum number of bytes of batches that wait on the device. dpex assumes for each batch the
            size of the largest so far. The default of 512 MiB is two batches of 400 images of 224 by 224 by 3 floats.
            A batch larger than the limit is copied when training asks for it.

    Raises:
        OptionError: An option has an invalid value. It is a ValueError.

    Examples:
        >>> import torch
        >>> from dpex import DeviceConfig, DpexDataLoader
        >>> halves = DeviceConfig(transform=lambda batch: batch / 2)
        >>> [batch.tolist() for batch in DpexDataLoader([1, 2], device="cpu", device_config=halves)]
        [[0.5], [1.0]]
    """

    transform: Callable[[Any], Any] | None = None
    budget_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        is_callable = self.transform is None or callable(self.transform)
        _require_field(self, "transform", is_callable, "a function of a batch, or None")
        _require_field(self, "budget_bytes", _is_whole(self.budget_bytes, 1), "a positive number of bytes")


@hinted
@dataclass(frozen=True, kw_only=True)
class TLSConfig:
    """The PEM files for metrics over TLS.

    Args:
        certfile: The certificate, and the certificates of the authorities between it and the root.
        keyfile: The private key of the certificate.
        client_cafile: The certificate of an authority. Only clients with a certificate from this authority have access.
            None: all clients have access.

    Raises:
        OptionError: A value is not a file's name. It is a ValueError.
    """

    certfile: str
    keyfile: str
    client_cafile: str | None = None

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            is_left_out = value is None and name == "client_cafile"
            _require_field(self, name, is_left_out or _is_text(value), "a PEM file's name")


@hinted
@dataclass(frozen=True, kw_only=True)
class MetricsConfig:
    """The address of the live page and of the metrics for Prometheus, and who may read them.

    A loader with a `MetricsConfig` serves metrics at its ``metrics_port``, else at ``$DPEX_METRICS_PORT``, else at a
    free port.

    Args:
        host: The address to serve on. By default only this machine can reach it.
        directory: The directory in which this process announces itself to Prometheus (``file_sd``) and ``dpex top``.
            None: ``$DPEX_METRICS_DIR``, else ``dpex`` in ``$XDG_RUNTIME_DIR``, else ``dpex-<uid>`` in the directory for
            temporary files, else ``dpex/metrics`` in ``$XDG_CACHE_HOME``. Only this user can read the last two.
        tls: The files for TLS. None: no TLS.
        allowed_hosts: Further host names that requests without TLS may use. ``.example.org`` is the domain with all
            subdomains, and ``*`` is any name. None: the names in ``$DPEX_METRICS_ALLOWED_HOSTS``, separated by commas.

    Raises:
        OptionError: An option has an invalid value. It is a ValueError.

    Examples:
        >>> from dpex import DpexDataLoader, MetricsConfig
        >>> config = MetricsConfig(allowed_hosts=["train.example.org"])
        >>> loader = DpexDataLoader([1, 2, 3], metrics_port=9400, metrics_config=config)
    """

    host: str = "127.0.0.1"
    directory: str | None = None
    tls: TLSConfig | None = None
    allowed_hosts: Sequence[str] | None = None

    def __post_init__(self) -> None:
        require, hosts = functools.partial(_require_field, self), self.allowed_hosts
        require("host", _is_text(self.host), "an address of this machine, such as '127.0.0.1' or '0.0.0.0'")
        require("directory", self.directory is None or _is_text(self.directory), "a directory or None")
        is_tls = self.tls is None or isinstance(self.tls, TLSConfig)
        require("tls", is_tls, "a TLSConfig(certfile=..., keyfile=...) or None")
        are_names = hosts is None or (isinstance(hosts, (list, tuple)) and all(isinstance(host, str) for host in hosts))
        require("allowed_hosts", are_names, "a list of names, such as ['train.example.org'], or None")


class LoaderOptions:
    """The options of a loader beyond torch's arguments, each an attribute of its own name.

    The class declares their names, types and defaults. `dpex.DpexDataLoader` describes their meaning.
    """

    distribute_mode: bool | Literal["auto"] = False
    head_address: str = "auto"
    seeding: Seeding | None = None
    autotune: AutotuneConfig | Literal[False] | None = None
    device: Any = None
    name: str | None = None
    metrics_port: int | None = None
    worker_config: WorkerConfig = WorkerConfig()
    cluster_config: ClusterConfig = ClusterConfig()
    device_config: DeviceConfig = DeviceConfig()
    sample_policy: SamplePolicy = SamplePolicy()
    metrics_config: MetricsConfig | None = None


DEFAULTS: Mapping[str, Any] = {name: getattr(LoaderOptions, name) for name in LoaderOptions.__annotations__}
"""The default of each option, by name."""


def checked(given: Mapping[str, Any], *, is_auto: bool = False, is_asynchronous: bool = False) -> dict[str, Any]:
    """Return all options by name, checked: the given options, and the defaults of the others. ``seeding`` is never
    None.

    ``num_workers="auto"`` sets ``autotune``: a framework that rebuilds the loader copies this option, and not "auto".

    Args:
        given: Options by name. None for an option that is a dataclass means its default.
        is_auto: True if ``num_workers`` is ``"auto"``.
        is_asynchronous: True if the dataset is asynchronous. Its samples do not have torch's seeds.

    Raises:
        OptionError: An option has an invalid value, or two options cannot be combined.
    """
    left_out = [name for name, value in given.items() if value is None and is_dataclass(DEFAULTS[name])]
    options = SimpleNamespace(**{**DEFAULTS, **given, **{name: DEFAULTS[name] for name in left_out}})
    _check_each(options)
    workers = options.worker_config
    if options.seeding is None:
        is_free = is_auto or is_asynchronous or isinstance(options.autotune, AutotuneConfig) or workers.share
        options.seeding = "batch" if is_free else "worker"
    _check_seeding(options, is_auto=is_auto)
    if is_auto and options.autotune is None:
        options.autotune = AutotuneConfig()
    _check_together(options)
    return vars(options)


_CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "distribute_mode": (
        lambda value: isinstance(value, bool) or value == "auto",
        "False (this machine), True (the Ray cluster) or 'auto'",
    ),
    "head_address": (
        lambda value: isinstance(value, str) and bool(_ADDRESS.fullmatch(value)),
        "'auto', 'local' or 'host:port'",
    ),
    "seeding": (lambda value: value in (None, *SEEDINGS), "'worker', 'batch' or None"),
    "autotune": (
        lambda value: value is None or value is False or isinstance(value, AutotuneConfig),
        "an AutotuneConfig(...), False for no tuning, or None to tune num_workers='auto' with the defaults",
    ),
    "name": (lambda value: value is None or _is_text(value), "a name or None"),
    "metrics_port": (
        lambda value: value is None or _is_whole(value, 0, 65535),
        "a port from 1 to 65535, 0 for one that is free, or None for no metrics",
    ),
    "metrics_config": (
        lambda value: value is None or isinstance(value, MetricsConfig),
        "a MetricsConfig(...) or None; the port is metrics_port",
    ),
}
"""The test of each option that is not a dataclass, and its requirement in words."""


def _check_each(options: Any) -> None:
    for name, default in DEFAULTS.items():
        value, kind = getattr(options, name), type(default)
        if is_dataclass(default):
            is_right, requirement = isinstance(value, kind), f"a {kind.__name__}(...), or None for its defaults"
        elif name in _CHECKS:
            test, requirement = _CHECKS[name]
            is_right = test(value)
        else:  # the device, which torch checks
            continue
        _require(is_right, f"{name}={value!r}: give {requirement}")


def _check_seeding(options: Any, *, is_auto: bool) -> None:
    """Raise OptionError if an option needs ``seeding="batch"`` and the seeding is ``"worker"``."""
    share, autotune = options.worker_config.share, options.autotune
    shares = f"WorkerConfig(share={share!r}) has other trainings' workers make the batches"
    tunes = "changes the number of workers"
    for is_given, need, remedy in (
        (is_auto and autotune is not False, f"num_workers='auto' {tunes}", "give a number of workers"),
        (isinstance(autotune, AutotuneConfig), f"autotune=AutotuneConfig(...) {tunes}", "leave autotune out"),
        (share, shares, "leave share out"),
    ):
        _require(
            not is_given or options.seeding == "batch",
            f"{need}, and seeding='worker' ties the random state to a worker: give seeding='batch', or {remedy}",
        )


def _check_together(options: Any) -> None:
    workers, samples, transform = options.worker_config, options.sample_policy, options.device_config.transform
    _require(
        workers.share is None or options.distribute_mode is False,
        f"WorkerConfig(share={workers.share!r}) is for the trainings of one machine, and distribute_mode="
        f"{options.distribute_mode!r} has workers elsewhere: give one of the two",
    )
    _require(
        not samples.is_on or workers.share is None,
        f"{samples} beside share={workers.share!r}: trainings that share batches get the errors of samples "
        "unchanged; give one of the two",
    )
    _require(
        transform is None or options.device is not None,
        f"DeviceConfig(transform={transform!r}) beside device=None: give a device, such as 'cuda'; with 'cpu' the "
        "transform runs on the host",
    )


# -- unknown names -----------------------------------------------------------------------------------------------------

_HOLDERS: dict[str, Any] = {name: type(default) for name, default in DEFAULTS.items() if is_dataclass(default)} | {
    "autotune": AutotuneConfig,
    "metrics_config": MetricsConfig,
}
HELD: Mapping[str, str] = {
    field.name: f"{option}={holder.__name__}({field.name}=...)"
    for option, holder in _HOLDERS.items()
    for field in fields(holder)
}
"""Options that are fields of another option, by name, each with its notation, as for `dpex.hints.with_hints`."""
