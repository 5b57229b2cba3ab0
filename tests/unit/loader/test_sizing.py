"""What a loader's arguments say of its workers and its prefetch, without a loader."""

import multiprocessing
import sys
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from torch.utils.data import BatchSampler, IterableDataset, SequentialSampler
from torch.utils.data.datapipes.map import SequenceWrapper

from dpex._torch import DatasetKind
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Limits
from dpex.errors import ClusterError, OptionError
from dpex.loader.sizing import TORCH_PREFETCH_FACTOR, Sizing
from dpex.loader.split_iterator import _decoding, _reading
from dpex.loader.streams import Streams
from dpex.measure.settings import Settings
from dpex.options import DeviceConfig, WorkerConfig
from dpex.worker.decoded_stream import decode_in_workers

PLAIN: dict[str, Any] = {
    "num_workers": 3,
    "prefetch_factor": TORCH_PREFETCH_FACTOR,
    "seeding": "batch",
    "dataset": [],
    "_index_sampler": BatchSampler(SequentialSampler([]), 4, drop_last=False),
    "distribute_mode": False,
    "worker_config": WorkerConfig(),
    "autotune": None,
    "_dataset_kind": DatasetKind.Map,
    "_is_auto": False,
    "_streams": None,
    "_settings": None,
    "_runtime": SimpleNamespace(tuner=None, iterators=[]),
}
TUNED: dict[str, Any] = {"_is_auto": True, "autotune": AutotuneConfig()}
REMOTE = {"distribute_mode": True}
STREAM = {"_dataset_kind": DatasetKind.Iterable}
STREAMS = Streams(count=3, why="The dataset is read in 3 streams, as the dataset names 3 shards.")
NOW = Settings(local=3, prefetch=6)


class Numbers(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(4))


def options(*, is_split: bool = False, **changes: Any) -> Sizing:
    """The sizing of a loader that has `PLAIN`'s attributes with these changes."""
    found = Sizing(SimpleNamespace(**{**PLAIN, "_pins": {}, **changes}))
    if is_split:
        found.is_split, found.is_iterable = True, False
    return found


def limits_of(sizing: Sizing) -> Limits:
    return sizing.limits(AutotuneConfig(), sizing.start_settings())


@pytest.mark.parametrize(
    ("changes", "sizes"),
    [
        ({}, Settings(local=3, prefetch=6)),
        ({"prefetch_factor": 5}, Settings(local=3, prefetch=15, is_prefetch_fixed=True)),
        ({"prefetch_factor": 2}, Settings(local=3, prefetch=6, is_prefetch_fixed=True)),
        (REMOTE, Settings(remote=3, prefetch=6)),
        ({"num_workers": 0, "prefetch_factor": None}, Settings(prefetch=0)),
    ],
)
def test_sizes_of_a_loader_that_is_not_tuned(changes: dict[str, Any], sizes: Settings) -> None:
    assert options(**changes).untuned_settings() == sizes
    assert sizes.is_prefetch_fixed == options(**changes).untuned_settings().is_prefetch_fixed


@pytest.mark.parametrize(
    ("changes", "is_tuned"),
    [
        ({}, False),
        (TUNED, True),
        ({"autotune": AutotuneConfig()}, True),
        ({**TUNED, "autotune": False}, False),
        ({**TUNED, "dataset": SequenceWrapper([1])}, False),
        ({**TUNED, **STREAM}, True),
        ({**TUNED, **STREAM, "num_workers": 0}, False),
    ],
)
def test_which_loaders_are_tuned(changes: dict[str, Any], is_tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "linux")
    assert options(**changes).is_tuned == is_tuned


def test_a_daemonic_process_has_remote_workers_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(multiprocessing.current_process()._config, "daemon", True)  # type: ignore[attr-defined]
    assert not options(**TUNED).is_tuned
    found = options(**TUNED, **REMOTE)
    assert found.is_tuned
    assert limits_of(found).local == 0


def test_tuning_begins_with_the_given_and_the_fixed_settings() -> None:
    given = options(autotune=AutotuneConfig(), prefetch_factor=4, _pins={"prefetch": 9})
    assert given.start_settings() == Settings(local=3, remote=0, prefetch=9)
    assert limits_of(given).least_prefetch == limits_of(given).prefetch == 9
    cold = options(**TUNED, _pins={"local": 2, "remote": 1})
    assert (cold.start_settings().local, cold.start_settings().remote) == (2, 1)


def test_streams_keep_their_number_and_the_reason_is_told() -> None:
    assert options(**TUNED)._why_untuned() == ""
    assert "Other workers" in options(**TUNED, is_split=True, _streams=STREAMS)._why_untuned()
    assert "in 3 streams, as num_workers says" in options(**STREAM, _streams=STREAMS)._why_untuned()
    given = options(**TUNED, **STREAM, _streams=STREAMS)
    assert given._why_untuned().startswith(STREAMS.why)
    assert given.start_settings() == Settings(local=3, remote=0, prefetch=6)
    limits = limits_of(given)
    assert (limits.least_local, limits.local, limits.remote) == (3, 3, 0)


def test_a_prefetch_that_was_asked_for_is_a_limit() -> None:
    assert not limits_of(options()).clip(NOW).is_prefetch_fixed
    assert [limits_of(options(prefetch_factor=given)).prefetch_factor for given in (2, 7)] == [2, 7]


@pytest.mark.parametrize(
    ("changes", "named", "fixed"),
    [
        ({}, (None, None, None), {}),
        ({}, (7, None, 3), {"local": 7, "prefetch": 3}),
        ({"seeding": "worker"}, (3, 0, None), {"local": 3, "remote": 0}),
        (STREAM, (None, None, 4), {"prefetch": 4}),
    ],
)
def test_what_a_resize_fixes(changes: dict[str, Any], named: Any, fixed: dict[str, int]) -> None:
    assert options(**changes).fixed_by_resize(NOW, *named) == fixed


@pytest.mark.parametrize(
    ("changes", "named", "message"),
    [
        ({"seeding": "worker"}, (5, None), r"resize\(local=5\) asks .* than the 3 local .* seeding='worker' ties"),
        ({"seeding": "worker"}, (1, 1), r"resize\(local=1, remote=1\) asks .* With seeding='batch' any number"),
        (STREAM, (5, None), r"resize\(local=5\) .* of an iterable dataset.* Make a new loader"),
        ({"dataset": SequenceWrapper([1])}, (5, None), r"resize\(\) of a loader of a DataPipe, .* make a new loader"),
    ],
)
def test_a_change_of_fixed_workers_is_refused_with_its_argument(
    changes: dict[str, Any], named: Any, message: str
) -> None:
    with pytest.raises(OptionError, match=message):
        options(**changes).fixed_by_resize(NOW, *named, None)


def test_remote_workers_without_ray_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ClusterError, match="need Ray, which is not installed"):
        options().resized(NOW, {"remote": 2})


def test_what_a_resize_does_not_fix_stays() -> None:
    assert options().resized(Settings(local=3, remote=1, prefetch=8), {"remote": 0}) == Settings(
        local=3, remote=0, prefetch=8
    )


def test_reading_and_decoding_workers_share_the_memory_budget() -> None:
    loader = SimpleNamespace(**PLAIN, _auto_collation=True, device_config=DeviceConfig())
    loader.dataset, loader.worker_config = decode_in_workers(Numbers(), int), WorkerConfig(memory_budget=1000)
    reading, decoding = _reading(loader), _decoding(loader, 1)
    assert (reading.worker_config.memory_budget, decoding.worker_config.memory_budget) == (250, 750)


class Running:
    """An engine that takes down what it is asked for."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self.asked: list[Settings] = []

    def resize(self, sizes: Settings) -> None:
        self.asked.append(sizes)


def resize(*engines: Running, sizes: tuple[int | None, int | None, int | None], **changes: Any) -> Sizing:
    runtime = SimpleNamespace(tuner=None, iterators=[SimpleNamespace(_engine=engine) for engine in engines])
    sizing = options(**REMOTE, **changes, _runtime=runtime)
    sizing.resize(*sizes)
    return sizing


def test_no_warning_is_given_where_all_takes_effect_at_once() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resize(Running(), sizes=(2, 1, None), seeding="batch")
        resize(Running(), sizes=(None, None, 7), seeding="worker")
