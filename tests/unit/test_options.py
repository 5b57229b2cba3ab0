"""dpex's own options: what is refused and how, what "auto" means, and that a rebuilt loader keeps all of them."""

import copy
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import FrozenInstanceError
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from inspection import settings_of, tuner_of
from torch.utils.data import IterableDataset

from dpex import AsyncDataset
from dpex.autotune.config import AutotuneConfig
from dpex.dataloader import DpexDataLoader
from dpex.errors import DpexError, OptionError
from dpex.loader.sizing import Sizing
from dpex.options import (
    _RAY_REMOTE_ARGS,
    DEFAULTS,
    ClusterConfig,
    DeviceConfig,
    MetricsConfig,
    TLSConfig,
    WorkerConfig,
    checked,
)
from dpex.schedule.sample_policy import SamplePolicy

DATA = list(range(10))


class Stream(IterableDataset[int]):
    num_shards = 3

    def __iter__(self) -> Iterator[int]:
        return iter(())


class Fetching(AsyncDataset):
    """An asynchronous dataset, which nobody reads."""

    async def fetch(self, index: Any) -> Any:
        raise NotImplementedError


REFUSED: dict[str, tuple[Any, ...]] = {
    "distribute_mode": (0, 1, "yes", None, 2),
    "head_address": ("", "somewhere", "host:", "host:port", "two words:6379", "auto\n", None, 6379),
    "seeding": ("epoch", "", 3, True),
    "autotune": (True, "fast", {}),
    "name": ("", 3),
    "metrics_port": (65536, -1, True, "9400"),
    "worker_config": ({"memory_budget": 3}, MetricsConfig()),
    "cluster_config": (4,),
    "device_config": (abs,),
    "sample_policy": ("skip",),
    "metrics_config": (9400, {"host": "0.0.0.0"}),
}
FIELDS: dict[type, dict[str, tuple[Any, ...]]] = {
    WorkerConfig: {
        "memory_budget": (0, -1, 1.5, True, "much"),
        "share": ("", 3),
        "share_bytes": (0, 1.5),
        "share_rank": (-1, 1.5, 0),
        "snapshot_every_n_steps": (0, -1, 1.5, True),
    },
    ClusterConfig: {"ray_remote_args": (4, ["num_cpus"])},
    DeviceConfig: {"transform": (3, "augment"), "budget_bytes": (0, -1, 1.5, True, None, "1GB")},
    SamplePolicy: {
        "on_error": ("ignore", None),
        "max_errors": (2, -0.1, True, None),
        "timeout_s": (0, -1, True, "3", float("inf")),
    },
    MetricsConfig: {
        "host": ("", None),
        "directory": ("", 3),
        "tls": (True, ("server.pem", "server.key")),
        "allowed_hosts": ("train.example.org", [b"train.example.org"]),
    },
    TLSConfig: {"certfile": ("", None), "keyfile": (3,), "client_cafile": ("",)},
}
NEEDED: dict[type, dict[str, Any]] = {TLSConfig: {"certfile": "server.pem", "keyfile": "server.key"}}
TORCHS: list[tuple[str, Any]] = [
    ("dataset", None),
    *(("num_workers", value) for value in (2.5, None, -1, "4", "Auto", "", "many")),
    *(("prefetch_factor", value) for value in (0, -1, "2", 2.5)),
    *(("timeout", "5"), ("timeout", None), ("timeout", -1), ("generator", 3)),
]
"""Arguments of torch's, which its own constructor accepts, or refuses without naming the value."""
ACCEPTED: list[tuple[str, Any]] = [
    ("distribute_mode", "auto"),
    *(("head_address", value) for value in ("auto", "local", "head.example.org:6379")),
    ("seeding", "batch"),
    *(("metrics_port", value) for value in (0, 65535)),
    ("worker_config", WorkerConfig(memory_budget=1 << 40)),
    ("cluster_config", ClusterConfig(ray_remote_args=MappingProxyType({"num_cpus": 2, "resources": {"ssd": 1}}))),
    ("metrics_config", MetricsConfig()),
]
RAY_REFUSED: list[tuple[str, Any, str]] = [
    ("num_cpus", "2", "a number of at least 0"),
    ("num_cpus", True, "a number of at least 0"),
    ("num_cpus", float("nan"), "a number of at least 0"),
    ("memory", "2G", "a number of at least 0, in bytes"),
    ("resources", {"ssd": "1"}, "a dict of custom resources"),
    ("resources", {"CPU": 2}, "a dict of custom resources, .* 'num_cpus', and workers have no GPU"),
    ("label_selector", {"region": 1}, "a dict of labels"),
    ("scheduling_strategy", "spread", "'DEFAULT' or 'SPREAD'"),
    ("runtime_env", "env.yaml", "a dict, such as"),
]
RAY_ACCEPTED: list[tuple[str, Any]] = [
    ("num_cpus", 0.5),
    ("memory", 2**30),
    ("resources", MappingProxyType({"ssd": 1})),
    ("label_selector", {"region": "us-west"}),
    ("scheduling_strategy", "DEFAULT"),
    ("runtime_env", {"env_vars": {"A": "1"}}),
]


def pairs(values: dict[Any, tuple[Any, ...]]) -> list[tuple[Any, Any]]:
    return [(name, value) for name, refused in values.items() for value in refused]


@pytest.mark.parametrize(("name", "value"), pairs(REFUSED), ids=str)
def test_a_refusal_names_option_value_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{name}={value!r}: give ")) as caught:
        DpexDataLoader(DATA, **{name: value})
    assert isinstance(caught.value, (DpexError, ValueError))


@pytest.mark.parametrize(
    ("kind", "name", "value"), [(kind, *pair) for kind, names in FIELDS.items() for pair in pairs(names)], ids=str
)
def test_a_value_refuses_a_field_by_its_name_value_and_remedy(kind: type, name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(f"{kind.__name__}({name}={value!r}): give ")):
        kind(**{**NEEDED.get(kind, {}), name: value})


@pytest.mark.parametrize("kind", FIELDS)
def test_values_are_frozen_and_keyword_only(kind: type) -> None:
    value = kind(**NEEDED.get(kind, {}))
    with pytest.raises(FrozenInstanceError):
        setattr(value, next(iter(FIELDS[kind])), None)
    with pytest.raises(TypeError):
        kind("auto")


@pytest.mark.parametrize(("name", "value"), ACCEPTED, ids=str)
def test_accepted(name: str, value: Any) -> None:
    assert getattr(DpexDataLoader(DATA, **{name: value}), name) == value


@pytest.mark.parametrize(("key", "value", "remedy"), RAY_REFUSED)
def test_an_argument_for_ray_is_refused_by_key_value_and_remedy(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"ray_remote_args[{key!r}]={value!r}: give ") + remedy):
        ClusterConfig(ray_remote_args={"num_cpus": 1, key: value})


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("max_restarts", "leave it out"),
        ("cpu_node", "leave it out, or give one of 'num_cpus', .* Custom resources belong in 'resources'"),
        (3, "leave it out"),
    ],
)
def test_a_key_that_is_not_taken_is_named_with_the_remedy(key: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"ray_remote_args has the key {key!r}: {remedy}"):
        ClusterConfig(ray_remote_args={key: 1})


def test_each_argument_that_is_taken_is_one_of_rays() -> None:
    """Ray checks them when an actor's options are given; nothing is started for that."""
    pytest.importorskip("ray")
    from dpex.pools.ray.guardians import guardian_class
    from dpex.pools.ray.room import worker_options

    assert {key for key, _ in RAY_ACCEPTED} == set(_RAY_REMOTE_ARGS) == {key for key, _, _ in RAY_REFUSED}
    for key, value in RAY_ACCEPTED:
        ClusterConfig(ray_remote_args={key: value})
        assert guardian_class().options(**worker_options({key: value}))
    with pytest.raises((TypeError, ValueError)):
        guardian_class().options(**worker_options({"num_cpus": "2"}))


def test_what_a_worker_needs_of_a_node() -> None:
    from dpex.pools.ray.room import needs_of, worker_options

    assert needs_of(worker_options(None)) == {"CPU": 1}
    asked = {"num_cpus": 0, "memory": 1000, "resources": {"ssd": 2}, "runtime_env": {}}
    assert needs_of(worker_options(asked)) == {"memory": 1000, "ssd": 2}
    with pytest.raises(OptionError, match="by which Ray places a worker"):
        ClusterConfig(ray_remote_args={"num_cpus": 0})


@pytest.mark.parametrize(("name", "value"), TORCHS, ids=str)
def test_an_invalid_torch_argument_is_named_with_the_remedy(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"{name}={re.escape(repr(value))}: (.* non-negative.*\. G|g)ive a "):
        DpexDataLoader(**{"dataset": [1, 2], "num_workers": 2, name: value})


def test_a_whole_number_of_numpy_is_one() -> None:
    loader = DpexDataLoader([1, 2], num_workers=np.int64(2), prefetch_factor=np.int32(3))  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("2G", 2 * 10**9), ("1.5GiB", 3 << 29), ("500 MB", 5 * 10**8), ("7k", 7000), ("7Ki", 7 << 10), ("9", 9)],
)
def test_a_budget_may_be_a_text_as_on_the_command_line(text: str, nbytes: int) -> None:
    assert WorkerConfig(memory_budget=text).memory_budget == nbytes


@pytest.mark.parametrize(
    ("options", "remedy"),
    [
        (
            {"autotune": AutotuneConfig(), "seeding": "worker"},
            r"autotune=AutotuneConfig\(\.\.\.\).* give seeding='batch'",
        ),
        ({"worker_config": WorkerConfig(share="a"), "seeding": "worker"}, "share='a'.* give seeding='batch'"),
        ({"worker_config": WorkerConfig(share="a"), "distribute_mode": True}, "share='a'.* distribute_mode=True"),
        (
            {"sample_policy": SamplePolicy(timeout_s=3), "worker_config": WorkerConfig(share="a"), "seeding": "batch"},
            "timeout_s=3.* share='a'.* give one of the two",
        ),
        ({"device_config": DeviceConfig(transform=abs)}, "transform=.* device=None: give a device"),
    ],
)
def test_options_that_exclude_each_other(options: dict[str, Any], remedy: str) -> None:
    with pytest.raises(OptionError, match=remedy):
        checked(options)


@pytest.mark.parametrize("more", [{}, {"autotune": AutotuneConfig()}])
def test_auto_with_worker_seeds_names_both_remedies(more: dict[str, Any]) -> None:
    with pytest.raises(
        OptionError, match=r"num_workers='auto' .*seeding='worker' .*give seeding='batch', or give a number"
    ):
        DpexDataLoader(DATA, num_workers="auto", seeding="worker", **more)
    loader = DpexDataLoader(DATA, num_workers="auto")
    with pytest.raises(OptionError, match="give a number of workers"):
        loader.seeding = "worker"


@pytest.mark.parametrize(
    ("options", "is_auto", "seeding"),
    [
        ({}, False, "worker"),
        ({}, True, "batch"),
        ({"seeding": "worker", "autotune": False}, True, "worker"),
        ({"seeding": "batch"}, False, "batch"),
        ({"autotune": AutotuneConfig()}, False, "batch"),
        ({"worker_config": WorkerConfig(share="a")}, False, "batch"),
    ],
)
def test_the_default_of_seeding(options: dict[str, Any], is_auto: bool, seeding: str) -> None:
    assert checked(options, is_auto=is_auto)["seeding"] == seeding


def test_an_address_that_has_no_effect_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="head_address='local' has no effect without distribute_mode: give"):
        DpexDataLoader([1, 2], num_workers=2, head_address="local")


@pytest.mark.parametrize("name", DEFAULTS)
def test_the_signature_is_the_declaration(name: str) -> None:
    parameter = inspect.signature(DpexDataLoader).parameters[name]
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default in (None, DEFAULTS[name])
    assert getattr(DpexDataLoader(DATA), name) == ("worker" if name == "seeding" else DEFAULTS[name])


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("memory_budget", "give worker_config=WorkerConfig(memory_budget=...)"),
        ("on_error", "give sample_policy=SamplePolicy(on_error=...)"),
        ("max_local", "give autotune=AutotuneConfig(max_local=...)"),
        ("ray_remote_args", "give cluster_config=ClusterConfig(ray_remote_args=...)"),
        ("num_worker", "give num_workers=... if you mean this one"),
        ("max_workers", "give autotune=AutotuneConfig(max_local=...) if you mean this one"),
        ("device_transform", "give device_config=DeviceConfig(transform=...) if you mean this one"),
    ],
)
def test_unknown_argument_gets_a_hint(name: str, hint: str) -> None:
    start = f"DpexDataLoader.__init__() got an unexpected keyword argument {name!r}: "
    with pytest.raises(TypeError, match=f"^{re.escape(start + hint)}$"):
        DpexDataLoader(DATA, **{name: 1})


@pytest.mark.parametrize(
    ("config", "name", "hint"),
    [
        (AutotuneConfig, "max_workers", "give max_local=... if you mean this one"),
        (AutotuneConfig, "prefetch_max", "give max_prefetch=... if you mean this one"),
        (WorkerConfig, "budget", "give memory_budget=... if you mean this one"),
        (ClusterConfig, "ray_args", "give ray_remote_args=... if you mean this one"),
    ],
)
def test_unknown_argument_of_a_config_gets_a_hint(config: Any, name: str, hint: str) -> None:
    start = f"{config.__name__}.__init__() got an unexpected keyword argument {name!r}: "
    with pytest.raises(TypeError, match=f"^{re.escape(start + hint)}$"):
        config(**{name: 1})


def test_unknown_argument_like_no_other_is_refused() -> None:
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'zzz'$"):
        DpexDataLoader(DATA, zzz=1)  # type: ignore[call-arg]


@pytest.mark.parametrize("count", [-1, "auto"])
def test_a_number_that_is_set_later_is_a_whole_one(count: Any) -> None:
    loader = DpexDataLoader(DATA, num_workers=2)
    with pytest.raises(OptionError, match=re.escape(f"loader.num_workers = {count!r}: assign a whole number")):
        loader.num_workers = count
    assert loader.num_workers == 2


def test_a_number_that_is_assigned_is_said_to_end_tuning() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    assert tuner_of(loader) is not None
    with pytest.warns(UserWarning, match=r"num_workers=1 was assigned .*AutotuneConfig\(max_local=1\)") as caught:
        loader.num_workers = 1
    assert caught[0].filename == __file__
    assert (tuner_of(loader), settings_of(loader).local, loader._is_auto) == (None, 1, False)


@pytest.mark.parametrize(
    ("dataset", "count", "remedy"),
    [(DATA, 0, r"nothing is tuned any more$"), (Stream(), 2, r"AutotuneConfig\(max_streams=2\)$")],
)
def test_the_remedy_of_an_assigned_number_can_be_followed(dataset: Any, count: int, remedy: str) -> None:
    loader = DpexDataLoader(dataset, num_workers="auto")
    with pytest.warns(UserWarning, match=remedy):
        loader.num_workers = count


def test_the_seeding_that_is_set_to_none_later_is_the_default() -> None:
    loader = DpexDataLoader(Fetching(), num_workers=1)
    loader.seeding = None
    assert loader.seeding == "batch"


def test_an_assigned_number_overrules_resize_and_a_configuration() -> None:
    loader = DpexDataLoader(DATA, num_workers=1, autotune=AutotuneConfig(max_local=4))
    loader.resize(local=3)
    with pytest.warns(UserWarning, match="nothing is tuned any more"):
        loader.num_workers = 2
    assert (settings_of(loader).local, loader.autotune) == (2, False)
    loader.resize(local=3)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.num_workers = 1
    assert settings_of(loader).local == 1


def test_an_option_set_later_is_checked_as_in_the_constructor() -> None:
    loader = DpexDataLoader(DATA)
    for name, value in (("seeding", "no"), ("device", "nowhere"), ("sample_policy", 3), ("metrics_port", -4)):
        before = getattr(loader, name)
        with pytest.raises(OptionError, match=re.escape(f"{name}={value!r}: give ")):
            setattr(loader, name, value)
        assert getattr(loader, name) == before
    loader.device, loader.worker_config = "cpu", None  # type: ignore[assignment]
    assert (loader.device, loader.worker_config) == (torch.device("cpu"), WorkerConfig())


@pytest.mark.parametrize("config", [None, AutotuneConfig(max_local=3)])
def test_auto_is_an_option_that_a_framework_copies(config: AutotuneConfig | None) -> None:
    loader = DpexDataLoader(DATA, num_workers="auto", autotune=config)
    again: Any = DpexDataLoader(DATA, num_workers=loader.num_workers, autotune=loader.autotune, seeding=loader.seeding)
    assert again.autotune == (config or AutotuneConfig())
    assert (again.num_workers, again.seeding, tuner_of(again) is not None) == (loader.num_workers, "batch", True)
    loader.autotune = None
    assert loader.autotune == AutotuneConfig()
    assert DpexDataLoader(DATA, num_workers="auto", autotune=False).autotune is False
    assert DpexDataLoader(DATA, num_workers=2).autotune is None


def test_auto_starts_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.dataloader.static_worker_count", lambda: 5)
    loader = DpexDataLoader(DATA, num_workers="auto")
    assert (loader._is_auto, loader.num_workers, loader.seeding) == (True, 5, "batch")


LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"num_workers": "auto"},
    "auto with worker seeds": {"num_workers": "auto", "seeding": "worker", "autotune": False},
    "fixed": {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "in_order": False, "timeout": 3},
    "batch seeds": {"num_workers": 2, "seeding": "batch", "worker_config": WorkerConfig(memory_budget=1 << 30)},
    "cluster": {
        "num_workers": 2,
        "distribute_mode": True,
        "head_address": "head:6379",
        "cluster_config": ClusterConfig(ray_remote_args={"num_cpus": 2, "runtime_env": {"pip": ["pillow"]}}),
    },
    "metrics": {"metrics_config": MetricsConfig(tls=TLSConfig(certfile="a.pem", keyfile="a.key")), "name": "train"},
    "functions": {"distribute_mode": "auto", "collate_fn": list, "worker_init_fn": abs},
}


def attributes(loader: DpexDataLoader[Any]) -> dict[str, Any]:
    """What a framework reads from a loader to build another of its class around the same sampler."""
    names = set(inspect.signature(type(loader)).parameters) - {"shuffle", "batch_sampler"}
    return {name: getattr(loader, name) for name in names}


def rebuilt(loader: DpexDataLoader[Any]) -> DpexDataLoader[Any]:
    return type(loader)(**attributes(loader))


HOWS: dict[str, Callable[[Any], Any]] = {"rebuilt": rebuilt, "pickled": lambda v: pickle.loads(pickle.dumps(v))}


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("kind", LOADERS)
def test_a_second_loader_has_every_attribute(kind: str, how: str) -> None:
    loader = DpexDataLoader(DATA, **LOADERS[kind])
    again = HOWS[how](HOWS[how](loader))
    before, after = attributes(loader), attributes(again)
    for attrs in (before, after):
        attrs["sampler"] = type(attrs["sampler"])
    assert after == before
    assert Sizing(again).is_tuned == Sizing(loader).is_tuned == (kind == "auto")


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize(("prefetch_factor", "prefetch"), [(None, 4), (2, 4), (7, 14)])
def test_a_second_loader_wants_the_same_workers_and_prefetch(
    how: str, prefetch_factor: int | None, prefetch: int
) -> None:
    """A prefetch that was not asked for must not become one that the engine keeps to the letter."""
    loader = DpexDataLoader(DATA, num_workers=2, prefetch_factor=prefetch_factor)
    found = settings_of(HOWS[how](loader))
    assert found == settings_of(loader)
    assert (found.prefetch, found.is_prefetch_fixed) == (prefetch, prefetch_factor is not None)


def test_a_python_without_its_lock_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.loader.checks.has_gil", lambda: False)
    with pytest.raises(OptionError, match="set PYTHON_GIL=1, or use a build"):
        DpexDataLoader([1, 2])


def test_an_option_set_later_fits_the_data_and_ends_tuning() -> None:
    stream = DpexDataLoader(Stream(), num_workers=1)
    before = stream.sample_policy
    with pytest.raises(OptionError, match="use a map-style dataset"):
        stream.sample_policy = SamplePolicy(on_error="skip")
    assert stream.sample_policy is before
    loader = DpexDataLoader(DATA, num_workers="auto")
    assert tuner_of(loader) is not None
    loader.autotune = False
    assert tuner_of(loader) is None


def test_a_copy_of_a_loader_is_resized_alone() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    copy.copy(loader).resize(local=1)
    assert loader._pins == {}
