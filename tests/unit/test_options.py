"""dpex's own options: what is refused and how, what "auto" means, and that a rebuilt loader has lost nothing."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
import re
from collections.abc import Callable
from dataclasses import FrozenInstanceError, fields
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch

from dpex.dataloader import DpexDataLoader
from dpex.errors import DpexError, FixedWorkersError, OptionError
from dpex.options import _RAY_REMOTE_ARGS, MetricsConfig, Options, TLSConfig, check_count, resolve_seeding

REFUSED: list[tuple[str, Any]] = [
    ("distribute_mode", "yes"),
    ("distribute_mode", None),
    ("distribute_mode", 2),
    ("head_address", ""),
    ("head_address", "somewhere"),
    ("head_address", "host:"),
    ("head_address", "host:port"),
    ("head_address", "two words:6379"),
    ("head_address", "auto\n"),
    ("head_address", None),
    ("head_address", 6379),
    ("seeding", "epoch"),
    ("memory_budget", 0),
    ("memory_budget", -1),
    ("memory_budget", 1.5),
    ("memory_budget", True),
    ("memory_budget", "much"),
    ("compression", "lz4"),
    ("compression", True),
    ("local_engine", "ray"),
    ("local_engine", None),
    ("name", ""),
    ("metrics_port", 65536),
    ("metrics_port", -1),
    ("metrics_port", True),
    ("metrics_port", "9400"),
    ("metrics", 9400),
    ("metrics", {"port": 9400}),
    ("ray_remote_args", 4),
    ("ray_remote_args", ["num_cpus"]),
]
TORCHS: list[tuple[str, Any]] = [
    ("dataset", None),
    *(("num_workers", value) for value in (2.5, None, -1, "4", "Auto", "")),
    *(("prefetch_factor", value) for value in (0, -1, "2", 2.5)),
]
"""Arguments of torch's, which its own constructor lets pass or refuses without naming the value."""
ACCEPTED: list[tuple[str, Any]] = [
    ("distribute_mode", False),
    ("distribute_mode", True),
    ("distribute_mode", "auto"),
    ("head_address", "auto"),
    ("head_address", "local"),
    ("head_address", "10.0.0.7:6379"),
    ("head_address", "head.example.org:6379"),
    ("head_address", "ray://head:10001"),
    ("seeding", "worker"),
    ("seeding", "batch"),
    ("memory_budget", None),
    ("memory_budget", 1 << 40),
    ("compression", None),
    ("compression", "zstd"),
    ("local_engine", "torch"),
    ("name", "train"),
    ("metrics_port", 0),
    ("metrics_port", 65535),
    ("metrics", MetricsConfig()),
    ("ray_remote_args", {}),
    ("ray_remote_args", {"num_cpus": 2, "resources": {"cpu_node": 1}}),
    ("ray_remote_args", MappingProxyType({"num_cpus": 1})),
]
RAY_REFUSED: list[tuple[str, Any, str]] = [
    ("num_cpus", "2", "a number of at least 0"),
    ("num_cpus", -1, "a number of at least 0"),
    ("num_cpus", True, "a number of at least 0"),
    ("num_gpus", float("nan"), "a number of at least 0"),
    ("memory", "2G", "a number of at least 0, in bytes"),
    ("resources", ["ssd"], "a dict of custom resources"),
    ("resources", {"ssd": "1"}, "a dict of custom resources"),
    ("resources", {"CPU": 2}, "a dict of custom resources, .* 'num_cpus' and 'num_gpus'"),
    ("accelerator_type", 4, "a str"),
    ("label_selector", {"region": 1}, "a dict of labels"),
    ("scheduling_strategy", "spread", "'DEFAULT', 'SPREAD' or a strategy"),
    ("scheduling_strategy", 3, "'DEFAULT', 'SPREAD' or a strategy"),
    ("runtime_env", "env.yaml", "a dict, such as"),
]
RAY_ACCEPTED: list[tuple[str, Any]] = [
    ("num_cpus", 0.5),
    ("num_gpus", 1),
    ("memory", 2**30),
    ("resources", MappingProxyType({"ssd": 1})),
    ("accelerator_type", "T4"),
    ("label_selector", {"region": "us-west"}),
    ("scheduling_strategy", "DEFAULT"),
    ("runtime_env", {"env_vars": {"A": "1"}}),
]
METRICS_REFUSED: list[tuple[str, Any]] = [
    ("port", 65536),
    ("port", -1),
    ("port", True),
    ("port", "9400"),
    ("host", ""),
    ("host", None),
    ("directory", ""),
    ("directory", 3),
    ("tls", True),
    ("tls", ("server.pem", "server.key")),
    ("allowed_hosts", "train.example.org"),
    ("allowed_hosts", [b"train.example.org"]),
]
TLS_REFUSED: list[tuple[str, Any]] = [("certfile", ""), ("certfile", None), ("keyfile", 3), ("client_cafile", "")]
DATA = list(range(10))


def test_compression_needs_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.transport.compression.can_compress", lambda: False)
    with pytest.raises(OptionError, match=r"needs zstandard.* pip install 'dpex\[compression\]'"):
        DpexDataLoader(DATA, compression="zstd")
    assert DpexDataLoader(DATA).compression is None


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_a_refusal_names_option_value_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(OptionError) as caught:
        Options(**{name: value})
    assert f"{name}={value!r}: give " in str(caught.value)


@pytest.mark.parametrize(("name", "value"), REFUSED)
def test_the_loader_refuses_the_same(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        DpexDataLoader(DATA, **{name: value})


@pytest.mark.parametrize(("name", "value"), ACCEPTED)
def test_accepted(name: str, value: Any) -> None:
    assert getattr(Options(**{name: value}), name) == value
    assert getattr(DpexDataLoader(DATA, **{name: value}), name) == value


@pytest.mark.parametrize(("key", "value", "remedy"), RAY_REFUSED)
def test_an_argument_for_ray_is_refused_by_key_value_and_remedy(key: str, value: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=re.escape(f"ray_remote_args[{key!r}]={value!r}: give ") + remedy):
        DpexDataLoader(DATA, ray_remote_args={"num_cpus": 1, key: value})


@pytest.mark.parametrize(
    ("key", "remedy"),
    [
        ("CPU", "give 'num_cpus'"),
        ("GPU", "give 'num_gpus'"),
        ("max_restarts", "leave it out"),
        ("cpu_node", "leave it out, or give one of 'num_cpus', .* Custom resources belong in 'resources'"),
        (3, "leave it out"),
    ],
)
def test_a_key_that_is_not_taken_is_named_with_the_remedy(key: Any, remedy: str) -> None:
    with pytest.raises(OptionError, match=f"ray_remote_args has the key {key!r}: {remedy}"):
        DpexDataLoader(DATA, ray_remote_args={key: 1})


def test_each_argument_that_is_taken_is_one_of_rays() -> None:
    """Ray checks them when an actor's options are given; nothing is started for that."""
    pytest.importorskip("ray")
    from dpex.pools.ray.guardian import guardian_class
    from dpex.pools.ray.reservations import actor_options

    assert {key for key, _ in RAY_ACCEPTED} == set(_RAY_REMOTE_ARGS) == {key for key, _, _ in RAY_REFUSED}
    for key, value in RAY_ACCEPTED:
        DpexDataLoader(DATA, ray_remote_args={key: value})
        assert guardian_class().options(**actor_options({key: value}))
    with pytest.raises((TypeError, ValueError)):
        guardian_class().options(**actor_options({"num_cpus": "2"}))


def test_what_a_worker_needs_of_a_node() -> None:
    from dpex.pools.ray.reservations import actor_options, needs_of

    assert needs_of(actor_options(None)) == {"CPU": 1}
    asked = {"num_cpus": 0, "num_gpus": 0.5, "memory": 1000, "resources": {"ssd": 2}, "runtime_env": {}}
    assert needs_of(actor_options(asked)) == {"GPU": 0.5, "memory": 1000, "ssd": 2}


@pytest.mark.parametrize(("name", "value"), METRICS_REFUSED)
def test_where_metrics_are_served_is_refused_by_name_value_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(f"MetricsConfig({name}={value!r}): give ")):
        MetricsConfig(**{name: value})


@pytest.mark.parametrize(("name", "value"), TLS_REFUSED)
def test_a_file_for_tls_is_refused_by_name_value_and_remedy(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=re.escape(f"TLSConfig({name}={value!r}): give a PEM file's name")):
        TLSConfig(**{"certfile": "server.pem", "keyfile": "server.key", name: value})


def test_metrics_are_asked_for_in_one_way() -> None:
    with pytest.raises(OptionError, match=r"metrics_port=0 beside metrics=MetricsConfig\(port=None, .*give one of the"):
        DpexDataLoader(DATA, metrics_port=0, metrics=MetricsConfig())


def test_options_are_frozen_and_keyword_only() -> None:
    with pytest.raises(FrozenInstanceError):
        Options().seeding = "batch"  # type: ignore[misc]
    with pytest.raises(TypeError):
        Options("auto")  # type: ignore[misc]


@pytest.mark.parametrize("name", [field.name for field in fields(Options)])
def test_each_option_has_the_same_default_in_the_loader(name: str) -> None:
    parameter = inspect.signature(DpexDataLoader).parameters[name]
    default = getattr(Options(), name)
    assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
    assert parameter.default == (None if name == "seeding" else default)
    assert getattr(DpexDataLoader(DATA), name) == default


@pytest.mark.parametrize(
    ("given", "auto", "resolved"),
    [
        (None, False, "worker"),
        (None, True, "batch"),
        ("worker", True, "worker"),
        ("batch", False, "batch"),
        ("batch", True, "batch"),
    ],
)
def test_resolve_seeding(given: str | None, auto: bool, resolved: str) -> None:
    assert resolve_seeding(given, auto) == resolved


@pytest.mark.parametrize("bad", ["epoch", "", 3, True])
def test_seeding_is_refused_by_value(bad: Any) -> None:
    with pytest.raises(OptionError, match="seeding=") as caught:
        resolve_seeding(bad, auto=False)
    assert repr(bad) in str(caught.value)


@pytest.mark.parametrize(("value", "least"), [(-1, 0), (0, 1), (1.0, 0), ("2", 0), (True, 0)])
def test_counts_are_refused_by_name_and_value(value: Any, least: int) -> None:
    with pytest.raises(OptionError) as caught:
        check_count("local", value, least)
    assert f"local={value!r}: give a whole number of at least {least}" in str(caught.value)


@pytest.mark.parametrize(("value", "least"), [(None, 0), (None, 1), (0, 0), (1, 1)])
def test_counts_accepted(value: Any, least: int) -> None:
    check_count("local", value, least)


def test_option_errors_are_value_errors() -> None:
    assert issubclass(OptionError, (DpexError, ValueError))
    assert issubclass(FixedWorkersError, ValueError)


# -- "auto" ------------------------------------------------------------------------------------------------------------

COPIES: dict[str, Callable[[Any], Any]] = {
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    **{f"pickle {p}": lambda value, p=p: pickle.loads(pickle.dumps(value, p)) for p in range(6)},
}


@pytest.mark.parametrize("how", COPIES)
def test_auto_survives_copies_of_a_loader(how: str) -> None:
    again = COPIES[how](DpexDataLoader(DATA, num_workers="auto"))
    assert again.auto_workers
    assert again._tuning() is not None


def test_a_number_of_workers_is_an_int_that_every_checkpoint_may_hold() -> None:
    count = DpexDataLoader(DATA, num_workers="auto").num_workers
    file = io.BytesIO()
    torch.save({"num_workers": count}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)["num_workers"]
    assert (loaded, type(loaded)) == (count, int)


def test_a_number_that_is_set_later_is_kept() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    loader.num_workers = 3
    assert not loader.auto_workers
    assert loader._tuning() is None


def test_auto_starts_from_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dpex.loader.sizing.static_worker_count", lambda: 5)
    loader = DpexDataLoader(DATA, num_workers="auto")
    assert (loader.auto_workers, loader.num_workers, loader.seeding) == (True, 5, "batch")


@pytest.mark.parametrize("bad", ["many", "", "Auto", "4"])
def test_only_auto_is_a_word_for_a_number(bad: str) -> None:
    with pytest.raises(OptionError) as caught:
        DpexDataLoader(DATA, num_workers=bad)  # type: ignore[arg-type]
    assert f"num_workers={bad!r}" in str(caught.value)


# -- rebuilding --------------------------------------------------------------------------------------------------------

OWN = ("distribute_mode", "head_address", "seeding", "memory_budget", "ray_remote_args", "compression", "local_engine")
LOADERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "auto": {"num_workers": "auto"},
    "auto with worker seeds": {"num_workers": "auto", "seeding": "worker"},
    "fixed": {"num_workers": 2, "prefetch_factor": 5, "persistent_workers": True, "in_order": False, "timeout": 3},
    "batch seeds": {"num_workers": 2, "seeding": "batch", "memory_budget": 1 << 30},
    "cluster": {
        "num_workers": 2,
        "distribute_mode": True,
        "head_address": "head:6379",
        "ray_remote_args": {"num_cpus": 2, "runtime_env": {"pip": ["pillow"]}},
        "compression": "zstd",
    },
    "metrics": {"metrics": MetricsConfig(tls=TLSConfig(certfile="a.pem", keyfile="a.key")), "name": "train"},
    "torch": {"local_engine": "torch", "distribute_mode": "auto", "collate_fn": list, "worker_init_fn": abs},
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
    again = HOWS[how](loader)
    before, after = attributes(loader), attributes(again)
    for attrs in (before, after):
        attrs["sampler"] = type(attrs["sampler"])
    assert after == before
    assert again.auto_workers == loader.auto_workers


def test_a_loader_rebuilt_twice_is_still_auto() -> None:
    again = rebuilt(rebuilt(DpexDataLoader(DATA, num_workers="auto")))
    assert (again.auto_workers, again.seeding) == (True, "batch")


@pytest.mark.parametrize("how", HOWS)
def test_a_second_loader_wants_the_same_workers_and_prefetch(how: str) -> None:
    """A prefetch that nobody asked for must not become one that the engine keeps to the letter."""
    loader = DpexDataLoader(DATA, num_workers=2)
    assert HOWS[how](loader)._current_sizes() == loader._current_sizes()


@pytest.mark.parametrize("how", HOWS)
def test_a_prefetch_that_was_asked_for_stays_asked_for(how: str) -> None:
    loader = DpexDataLoader(DATA, num_workers=2, prefetch_factor=7)
    assert HOWS[how](loader)._current_sizes().prefetch == 14


def test_options_are_attributes_of_their_own_name() -> None:
    loader = DpexDataLoader(DATA, **LOADERS["cluster"])
    assert {name: getattr(loader, name) for name in OWN} == {
        "distribute_mode": True,
        "head_address": "head:6379",
        "seeding": "worker",
        "memory_budget": None,
        "ray_remote_args": {"num_cpus": 2, "runtime_env": {"pip": ["pillow"]}},
        "compression": "zstd",
        "local_engine": "dpex",
    }


# -- resize without workers: arguments only ----------------------------------------------------------------------------


@pytest.mark.parametrize("bad", [{"local": -1}, {"remote": 1.5}, {"prefetch": 0}, {"local": "2"}])
def test_resize_names_what_it_refuses(bad: dict[str, Any]) -> None:
    loader = DpexDataLoader(DATA, num_workers=2, seeding="batch")
    before = loader._current_sizes()
    ((name, value),) = bad.items()
    with pytest.raises(OptionError, match=f"{name}={value!r}"):
        loader.resize(**bad)
    assert loader._current_sizes() == before


def test_resize_under_worker_seeds_moves_but_does_not_change_the_number() -> None:
    loader = DpexDataLoader(DATA, num_workers=3)
    with pytest.raises(FixedWorkersError, match=r"local=1, remote=1.*num_workers=3"):
        loader.resize(local=1, remote=1)
    with pytest.raises(FixedWorkersError, match="local=5"):
        loader.resize(local=5)
    loader.resize(local=1)
    sizes = loader._current_sizes()
    assert (sizes.local, sizes.remote) == (1, 2)


def test_resize_under_batch_seeds_takes_any_number() -> None:
    loader = DpexDataLoader(DATA, num_workers="auto")
    loader.resize(local=7, prefetch=3)
    sizes = loader._current_sizes()
    assert (sizes.local, sizes.remote, sizes.prefetch) == (7, 0, 3)


@pytest.mark.parametrize(("name", "value"), TORCHS, ids=str)
def test_a_wrong_value_of_torchs_arguments_is_named_with_the_remedy(name: str, value: Any) -> None:
    given: dict[str, Any] = {"dataset": [1, 2], "num_workers": 2, name: value}
    with pytest.raises(OptionError, match=rf"{name}={re.escape(repr(value))}: give a ") as error:
        DpexDataLoader(**given)
    assert isinstance(error.value, ValueError)


def test_a_whole_number_of_numpy_is_one() -> None:
    loader = DpexDataLoader([1, 2], num_workers=np.int64(2), prefetch_factor=np.int32(3))  # type: ignore[arg-type]
    assert (loader.num_workers, loader.prefetch_factor) == (2, 3)


@pytest.mark.parametrize(
    ("text", "nbytes"), [("2G", 2 << 30), ("1.5GiB", 3 << 29), ("500 MB", 500 << 20), ("7k", 7 << 10), ("9", 9)]
)
def test_a_budget_may_be_a_text_as_on_the_command_line(text: str, nbytes: int) -> None:
    assert DpexDataLoader([1, 2], memory_budget=text).memory_budget == nbytes


def test_an_address_that_has_no_effect_is_warned_of() -> None:
    with pytest.warns(UserWarning, match="head_address='local' has no effect without distribute_mode: give"):
        DpexDataLoader([1, 2], num_workers=2, head_address="local")
