"""The costly call in real loaders: it is named wherever batches are made, and batches stay what they are."""

import asyncio
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset
from workload import wait_as_work

from dpex import DpexDataLoader, decode_in_workers
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.diagnose.facts import Facts
from dpex.diagnose.hot_calls import hot_calls, sentence
from dpex.measure import sampling
from dpex.measure.pool_reading import CallSums, PoolReading
from dpex.profile.live_timer import SWITCH
from tests.diagnose.planted import Case, Dear, Transformed
from tests.unit.diagnose.test_verdict import COLLATING, COMPUTING, facts, pool

PLACES: dict[str, dict[str, Any]] = {
    "torch's own iterator": {"num_workers": 0, "seeding": "worker"},
    "in-process": {"num_workers": 0},
    "processes": {"num_workers": 2},
    "logical workers": {"num_workers": 2, "seeding": "worker"},
}
LINE = Dear.__mro__[1].__call__.__code__.co_firstlineno + 2
DEAR = f"`zlib.crc32` (tests/diagnose/planted.py:{LINE})"
"""The call that `Transformed` spends its time in."""


def check_dear(diagnosis: Diagnosis) -> None:
    """The costly call is known, with about its share, and its half is predicted."""
    found = {one.name.rpartition(" > ")[2]: one for one in diagnosis.facts.calls}
    assert {"load", "collate", "Transformed.__getitem__"} <= found.keys()
    dear = [one for one in diagnosis.facts.calls if "Dear.__call__" in one.name]
    computed_s = sum(one.all_cpu_s for one in diagnosis.facts.calls)
    assert 0.6 < sum(one.all_cpu_s for one in dear) / computed_s < 0.95
    changes = {one.change for one in diagnosis.predictions}
    assert not changes or any(DEAR in change for change in changes)
    assert not any("single calls" in gap for gap in diagnosis.facts.unmeasured)
    assert 1 <= found["load"].calls < 0.5 * diagnosis.facts.samples  # of a batch now and then


@pytest.mark.alone  # a few timed calls decide, and a neighbour slows one of them
@pytest.mark.parametrize("place", PLACES)
def test_the_dear_call_is_named(place: str) -> None:
    size = 1500 if PLACES[place]["num_workers"] else 900  # over a second also on a machine three times as fast
    diagnosis = Case(dataset=partial(Transformed, size), accepted=("cpu",), options=PLACES[place]).run()
    check_dear(diagnosis)
    assert diagnosis.verdict.cause == "cpu", str(diagnosis)
    assert DEAR in diagnosis.verdict.where
    assert DEAR in diagnosis.verdict.sentence
    assert "zlib.crc32" in sentence(diagnosis.facts)


class Augmented(Dataset[Any]):
    """Draws, and counts what it does."""

    def __init__(self) -> None:
        self.calls = 0

    def noise(self, value: Any) -> Any:
        self.calls += 1
        return value + random.random() + self.calls

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> Any:
        return self.noise(torch.tensor(float(index))) + torch.rand(())


class Drawing(Augmented):
    """Without a count, so that it does not matter who makes a batch."""

    def noise(self, value: Any) -> Any:
        return value + random.random()


class Streamed(IterableDataset[Any]):
    def __init__(self) -> None:
        self.augmented = Augmented()

    def __iter__(self) -> Iterator[Any]:
        for index in range(60):
            yield self.augmented[index]


class Awaited(Drawing):
    async def __getitem__(self, index: int) -> Any:  # type: ignore[override]
        await asyncio.get_running_loop().run_in_executor(None, float, index)
        return torch.tensor(float(index))


def doubled(value: Any) -> Any:
    return value * 2


@pytest.mark.parametrize(
    ("dataset", "options"),
    [
        (Augmented, {"num_workers": 0, "seeding": "worker"}),
        (Augmented, {"num_workers": 0, "seeding": "batch"}),
        (Augmented, {"num_workers": 2, "seeding": "worker"}),
        (Drawing, {"num_workers": 2, "seeding": "batch"}),
        (Streamed, {"num_workers": 2}),
        (Awaited, {"num_workers": 0, "seeding": "batch"}),
        (Awaited, {"num_workers": 2, "seeding": "batch"}),
        (lambda: decode_in_workers(range(60), doubled), {"num_workers": 2, "seeding": "batch"}),
    ],
)
def test_batches_are_the_same_with_all_of_them_timed(
    monkeypatch: pytest.MonkeyPatch, dataset: Any, options: dict[str, Any]
) -> None:
    for name, value in (("FIRST_S", 0.0), ("REST", 0.0), ("_PART", 1e9), ("_BY", 1)):
        monkeypatch.setattr(sampling, name, value)
    for name in ("REST", "APART_S"):
        monkeypatch.setattr(f"dpex.profile.live_timer.{name}", 0.0)

    def run(switch: str) -> tuple[list[Any], Facts]:
        monkeypatch.setenv(SWITCH, switch)
        torch.manual_seed(3)
        random.seed(3)
        with DpexDataLoader(dataset(), batch_size=3, **options) as loader:
            loader.diagnose()
            made = [*loader, *loader]
            return made, loader.diagnose().facts

    timed, with_it = run("")
    plain, without = run("0")
    assert len(timed) == len(plain)
    assert all(torch.equal(one, other) for one, other in zip(timed, plain, strict=True))
    assert {one.name: one.calls for one in with_it.calls}["load"] > 20
    assert without.calls == ()
    assert any(f"${SWITCH} forbids it" in gap for gap in without.unmeasured)


class Blocking(Dataset[Any]):
    """Waits without an await."""

    def __len__(self) -> int:
        return 160

    async def __getitem__(self, index: int) -> Any:
        wait_as_work(0.004)
        return index


def test_a_call_that_blocks_the_event_loop_is_told_so() -> None:
    with DpexDataLoader(Blocking(), batch_size=8, num_workers=1, collate_fn=list) as loader:
        assert len(list(loader)) == 20
        found = loader.diagnose().facts
    assert found.is_asynchronous
    assert "blocks the event loop" in sentence(found)


def test_only_what_came_since_a_reset_is_told() -> None:
    with DpexDataLoader(Transformed(120), batch_size=2, seeding="batch") as loader:
        loader.diagnose()
        list(loader)
        first = loader.diagnose(reset=True).facts
        second = first
        while second is first or not second.calls:  # a batch is timed now and then, by the clock
            list(loader)
            second = loader.diagnose().facts
        third = loader.diagnose().facts
    assert second.calls == third.calls
    load_s = sum(pool.load_s for pool in second.pools.values())
    assert sum(one.all_wall_s for one in second.calls if not one.is_collating) == pytest.approx(load_s)


def calls(**cpu_s: float) -> dict[str, CallSums]:
    """Of getting samples, with as much wall time."""
    within = {"own": "load > D.__getitem__", "collate": "collate", "mixup": "collate > mixup (d.py:9)"}
    return {
        within.get(name, f"load > D.__getitem__ > {name} (d.py:5)"): CallSums(calls=9, wall_s=s, cpu_s=s)
        for name, s in {"own": 0.0, **cpu_s}.items()
    } | {"load": CallSums(calls=9)}


def told(measured: Facts, timed: dict[str, CallSums]) -> Diagnosis:
    return diagnose(replace(measured, pools={"local": replace(measured.pools["local"], calls=timed)}))


def test_a_call_that_takes_most_is_named() -> None:
    measured = facts({"read": 0.1, "transform": 6.0}, COMPUTING)
    found = told(measured, calls(own=0.1, crop=0.7, flip=0.2))
    assert found.verdict.where == "the dataset, 70 % of it in `crop` (d.py:5)"
    assert sentence(found.facts).startswith(
        "70 % of making a batch is `crop`, called in `D.__getitem__` (d.py:5); 20 %"
    )
    assert told(measured, calls(own=0.1, crop=0.4, flip=0.4)).verdict.where == "the dataset"
    assert told(measured, calls(own=0.9, crop=0.02)).verdict.where == "the dataset, 100 % of it in `D.__getitem__`"


def test_the_verdict_names_the_slow_call_of_the_collate_function() -> None:
    measured = facts({"transform": 0.6, "collate": 5.4}, COLLATING)
    found = told(measured, calls(own=0.1, crop=0.9, collate=0.1, mixup=0.9))
    assert found.verdict.where == "the collate function, 90 % of it in `mixup` (d.py:9)"


def test_computing_and_waiting_are_named_apart() -> None:
    timed = calls(own=0.0, resize=0.7, open=0.3)
    timed["load > D.__getitem__ > open (d.py:5)"] = CallSums(calls=9, wall_s=0.3, cpu_s=0.01)
    measured = facts({"read": 6.0}, pool(load_s=40.0, load_cpu_s=28.0))
    found = told(measured, timed)
    assert "; 30 % is `open` (d.py:5), which waits for data." in sentence(found.facts)
    assert [one.waits_for for one in hot_calls(found.facts)] == ["", "data"]
    assert "`resize` (d.py:5), which computes, at half its cost" in {one.change for one in found.predictions}


def test_pipelines_are_divided_and_inner_calls_are_not() -> None:
    at = "load > D.__getitem__ > Compose.__call__ (d.py:5)"
    merge = "load > D.__getitem__ > DataFrame.merge (d.py:7)"
    seconds = {"load": 0.0, "load > D.__getitem__": 0.0, at: 0.0, merge: 0.0}
    seconds |= {f"{at} > Blur.__call__ [c.py:9]": 0.3, f"{at} > Crop.__call__ [c.py:9]": 0.2}
    seconds |= {f"{merge} > join [p.py:3]": 0.3, f"{merge} > take [p.py:4]": 0.2}
    timed = {name: CallSums(calls=9, wall_s=s, cpu_s=s) for name, s in seconds.items()}
    found = told(facts({"read": 6.0}, pool(load_s=40.0, load_cpu_s=40.0)), timed)
    names = [(one.name, one.line, round(one.share, 2)) for one in hot_calls(found.facts)]
    assert names == [
        ("DataFrame.merge", "d.py:7", 0.5),
        ("Blur.__call__", "d.py:5", 0.3),
        ("Crop.__call__", "d.py:5", 0.2),
    ]


def test_pools_stand_for_themselves() -> None:
    """A pool whose batches were timed seldom counts by what it did, not by what was timed of it."""
    seldom, often = calls(own=0.5, crop=0.5), calls(own=10.0, crop=90.0)
    pools = {
        "local": PoolReading(load_s=60.0, load_cpu_s=60.0, calls=seldom),
        "remote": PoolReading(load_s=20.0, load_cpu_s=10.0, calls=often),
    }
    found = {one.name.rpartition(" > ")[2]: one for one in Facts(pools=pools).calls}
    assert [found[name].all_wall_s for name in ("D.__getitem__", "crop (d.py:5)")] == pytest.approx([32.0, 48.0])
    assert [found[name].all_cpu_s for name in ("D.__getitem__", "crop (d.py:5)")] == pytest.approx([31.0, 39.0])
