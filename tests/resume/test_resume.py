"""`state_dict` and `load_state_dict`: a later run gets the batches that follow, each once and bit for bit."""

import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import kept, leaves, saved
from inspection import iterator_of
from torch.utils.data import (
    BatchSampler,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    TensorDataset,
    WeightedRandomSampler,
    get_worker_info,
)

from dpex import DpexDataLoader, StateError
from dpex.options import WorkerConfig
from dpex.worker.states import global_states

SIZE = 30
STREAM = 14
BATCH = 3


class Augmented(Dataset[Any]):
    """Each sample has draws from the three global generators."""

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> tuple[Any, ...]:
        return index, torch.rand(()), random.random(), np.random.rand()


class Reader(IterableDataset[Any]):
    """Worker k of W yields every W-th number with a draw; ``state`` tells where it is."""

    def __init__(self) -> None:
        self.at = self.begin = 0

    def __iter__(self) -> Iterator[Any]:
        worker = get_worker_info()
        number, count = (worker.id, worker.num_workers) if worker else (0, 1)
        begin, self.begin = self.begin, 0
        for at in range(begin, STREAM + 4 * number):
            self.at = at + 1
            yield at * count + number, random.random() if worker else 0.0
        self.at = 0


class StatefulReader(Reader):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


DATASETS: dict[str, Any] = {"map": Augmented, "stream": Reader, "stateful stream": StatefulReader}


def loader_of(kind: str, seed: int = 3, **options: Any) -> DpexDataLoader[Any]:
    dataset = DATASETS[kind]()
    if kind == "map":
        options.setdefault("shuffle", "sampler" not in options)
    generator = torch.Generator().manual_seed(seed)
    return DpexDataLoader(dataset, batch_size=BATCH, generator=generator, **options)


def plain(batch: Any) -> Any:
    return [part.tolist() for part in batch]


def interrupted(loader: DpexDataLoader[Any], at: int) -> tuple[Any, list[Any]]:
    """The state after ``at`` batches, saved and loaded, and what follows."""
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    return kept(loader.state_dict()), [plain(batch) for batch in iterator]


def resumed(loader: DpexDataLoader[Any], state: Any) -> list[Any]:
    loader.load_state_dict(state)
    return [plain(batch) for batch in loader]


PLACES: dict[str, dict[str, Any]] = {
    "in-process": {"num_workers": 0},
    "2 workers": {"num_workers": 2},
    "2 persistent": {"num_workers": 2, "persistent_workers": True},
}


@pytest.mark.smoke
def test_a_stream_without_a_state_passes_over_what_was_delivered() -> None:
    with loader_of("stream") as loader:
        state, rest = interrupted(loader, 4)
    told = "Reader nor its iterator has a state_dict.*discard 4 batches"
    with loader_of("stream") as loader, pytest.warns(RuntimeWarning, match=told):
        assert resumed(loader, state) == rest


def test_the_global_generators_are_left_alone_when_a_run_goes_on() -> None:
    torch.manual_seed(0)
    with DpexDataLoader(Augmented(), batch_size=BATCH, shuffle=True, num_workers=1) as loader:
        state, rest = interrupted(loader, 4)
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with DpexDataLoader(Augmented(), batch_size=BATCH, shuffle=True, num_workers=1) as loader:
        assert resumed(loader, state) == rest
    assert torch.equal(torch.get_rng_state(), before)


class Buckets(Sampler[list[int]]):
    """A batch sampler with ``set_epoch``; ``counts``: it counts its epochs by itself, too."""

    def __init__(self, *, counts: bool = False) -> None:
        self.epoch, self.counts = 0, counts

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[list[int]]:
        order = torch.randperm(SIZE, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        yield from (order[at : at + BATCH] for at in range(0, SIZE, BATCH))
        self.epoch += self.counts

    def __len__(self) -> int:
        return SIZE // BATCH


def distributed(kind: str, place: str) -> tuple[DpexDataLoader[Any], Any]:
    if kind == "batch sampler":
        batches = Buckets()
        return DpexDataLoader(range(SIZE), batch_sampler=batches, **PLACES[place]), batches
    sampler: Any = DistributedSampler(range(SIZE), num_replicas=2, rank=1, seed=4)  # type: ignore[arg-type]
    return DpexDataLoader(range(SIZE), batch_size=BATCH, sampler=sampler, **PLACES[place]), sampler


@pytest.mark.parametrize("order", ["set, load", "load, set", "set, load, set"])
@pytest.mark.parametrize(
    ("kind", "place"), [("distributed", "in-process"), ("distributed", "2 persistent"), ("batch sampler", "2 workers")]
)
def test_the_epoch_that_is_set_counts_after_the_end_of_an_epoch(kind: str, place: str, order: str) -> None:
    loader, sampler = distributed(kind, place)
    epochs, states = [], []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append([batch.tolist() for batch in loader])
        states.append(kept(loader.state_dict()))
    loader.close()
    for ended, following in ((0, 1), (1, 2), (0, 2)):
        loader, sampler = distributed(kind, place)
        for step in order.split(", "):
            if step == "set":
                sampler.set_epoch(following)
            else:
                loader.load_state_dict(states[ended])
        assert [batch.tolist() for batch in loader] == epochs[following]
        loader.close()


def test_a_sampler_that_counts_its_epochs_goes_on_counting() -> None:
    loader = DpexDataLoader(range(SIZE), batch_sampler=Buckets(counts=True))
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    state = kept(loader.state_dict())
    epochs.append([batch.tolist() for batch in loader])
    loader = DpexDataLoader(range(SIZE), batch_sampler=Buckets(counts=True))
    assert resumed_numbers(loader, state) == epochs[2]


def resumed_numbers(loader: DpexDataLoader[Any], state: Any) -> list[Any]:
    loader.load_state_dict(state)
    return [batch.tolist() for batch in loader]


@pytest.mark.parametrize("place", ["in-process", "2 workers", "2 persistent"])
def test_the_next_epoch_is_shuffled_as_it_would_have_been(place: str) -> None:
    """Also without a generator of the loader's own, and wherever torch's global one is by then."""
    torch.manual_seed(0)
    with DpexDataLoader(Augmented(), shuffle=True, seeding="batch", **PLACES[place]) as loader:
        list(loader)
        state, rest = loader.state_dict(), [plain(batch) for batch in loader]
    torch.manual_seed(1)
    with DpexDataLoader(Augmented(), shuffle=True, seeding="batch", **PLACES[place]) as loader:
        loader.load_state_dict(state)
        middle, later = interrupted(loader, 7)
        assert later == rest[7:]
    with DpexDataLoader(Augmented(), shuffle=True, seeding="batch", **PLACES[place]) as loader:
        assert resumed(loader, middle) == later


class Broken(Augmented):
    def __getitem__(self, index: int) -> Any:
        if index == 4:
            raise ValueError("sample 4")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_raised_counts_as_delivered(workers: int) -> None:
    with DpexDataLoader(Broken(), batch_size=BATCH, num_workers=workers) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(ValueError, match="sample 4"):
            next(iterator)
        state = loader.state_dict()
    with DpexDataLoader(Broken(), batch_size=BATCH, num_workers=workers) as loader:
        assert resumed(loader, state)[0][0] == [6, 7, 8]


@pytest.mark.parametrize(("goes_on", "rest"), [(False, [3, 4, 5]), (True, [6, 7, 8])])
def test_a_batch_that_ctrl_c_interrupts_here_is_made_again(goes_on: bool, rest: list[int]) -> None:
    class Interrupted(Augmented):
        is_armed = True

        def __getitem__(self, index: int) -> Any:
            if index == 4 and self.is_armed:
                self.is_armed = False
                raise KeyboardInterrupt
            return super().__getitem__(index)

    dataset = Interrupted()
    with DpexDataLoader(dataset, batch_size=BATCH) as loader:
        iterator = iter(loader)
        next(iterator)
        with pytest.raises(KeyboardInterrupt):
            next(iterator)
        if goes_on:
            next(iterator)
        state = loader.state_dict()
    with DpexDataLoader(dataset, batch_size=BATCH) as loader:
        assert resumed(loader, state)[0][0] == rest


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_batches_delivered_ahead_are_skipped_inline_in_each_run(steps: int) -> None:
    with loader_of("map", seeding="batch") as loader:
        iterator = iter(loader)
        wanted = [plain(next(iterator)) for _ in range(2)]
        state = kept(loader.state_dict()) | {"ahead": [3, 4]}
        wanted += [plain(batch) for batch in iterator]
    with loader_of("map", seeding="batch") as loader:
        loader.load_state_dict(state)
        iterator = iter(loader)
        seen = [plain(next(iterator)) for _ in range(steps)]
        state = kept(loader.state_dict())
    with loader_of("map", seeding="batch") as loader:
        assert seen + resumed(loader, state) == [wanted[2], *wanted[5:]]


class Counting(Sampler[int]):
    """A generator of Python, with a draw of its own for each index and a state."""

    def __init__(self) -> None:
        self.at = self.begin = self.drawn = 0

    def __iter__(self) -> Iterator[int]:
        begin, self.begin = self.begin, 0
        for at in range(begin, SIZE):
            self.at = at + 1
            self.drawn += 1
            yield (7 * at) % SIZE

    def __len__(self) -> int:
        return SIZE

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin = state["at"]


class Shuffled(Sampler[int]):
    """It draws from a global generator that torch's samplers leave alone, one index at a time."""

    def __iter__(self) -> Iterator[int]:
        order = list(range(SIZE))
        random.shuffle(order)
        yield from order

    def __len__(self) -> int:
        return SIZE


SAMPLERS: dict[str, Any] = {
    "list": lambda: [5 * k % SIZE for k in range(SIZE)],
    "weighted": lambda: WeightedRandomSampler([1.0] * SIZE, SIZE, generator=torch.Generator().manual_seed(1)),
    "weighted by the global generator": lambda: WeightedRandomSampler([1.0] * SIZE, SIZE),
    "distributed": lambda: DistributedSampler(Augmented(), num_replicas=2, rank=1),
    "stateful": Counting,
    "of one's own": Shuffled,
}


@pytest.mark.parametrize(("kind", "workers"), [*((kind, 1) for kind in SAMPLERS), ("stateful", 0), ("of one's own", 0)])
def test_any_sampler_is_gone_on_with_where_it_was(kind: str, workers: int) -> None:
    options: dict[str, Any] = {"seeding": "batch", "num_workers": workers}
    with loader_of("map", sampler=SAMPLERS[kind](), **options) as loader:
        state, rest = interrupted(loader, 3)
    random.seed(17)
    torch.manual_seed(17)
    with loader_of("map", sampler=SAMPLERS[kind](), **options) as loader:
        assert resumed(loader, state) == rest
    assert rest


def test_a_stateful_sampler_does_not_draw_what_was_delivered() -> None:
    with loader_of(
        "map", sampler=Counting(), worker_config=WorkerConfig(snapshot_every_n_steps=1), num_workers=1
    ) as loader:
        state, rest = interrupted(loader, 8)
    sampler = Counting()
    with loader_of(
        "map", sampler=sampler, worker_config=WorkerConfig(snapshot_every_n_steps=1), num_workers=1
    ) as loader:
        assert resumed(loader, state) == rest
    assert sampler.drawn == len(rest) * BATCH


def test_batch_samplers_and_unbatched_samples_are_resumed() -> None:
    for options in (
        {"batch_sampler": BatchSampler(range(SIZE), 4, drop_last=True)},
        {"batch_size": None, "shuffle": True, "generator": torch.Generator().manual_seed(2)},
    ):
        with DpexDataLoader(TensorDataset(torch.arange(SIZE)), **options) as loader:
            state, rest = interrupted(loader, 5)
        with DpexDataLoader(TensorDataset(torch.arange(SIZE)), **options) as loader:
            assert resumed(loader, state) == rest


def test_nothing_is_read_of_what_was_delivered() -> None:
    read: list[int] = []

    class Noting(Augmented):
        def __getitem__(self, index: int) -> Any:
            read.append(index)
            return index

    with DpexDataLoader(Noting(), batch_size=BATCH) as loader:
        iterator = iter(loader)
        for _ in range(6):
            next(iterator)
        state = loader.state_dict()
    read.clear()
    with DpexDataLoader(Noting(), batch_size=BATCH) as loader:
        loader.load_state_dict(state)
        next(iter(loader))
    assert read == [18, 19, 20]


def test_the_state_is_small_plain_and_a_copy() -> None:
    with loader_of("map", seeding="batch", num_workers=2) as loader:
        iterator = iter(loader)
        next(iterator)
        state = loader.state_dict()
        first = saved(state)
        for _ in iterator:
            pass
        assert saved(state) == first
    assert len(first) < 10_000
    assert state["version"] == 1


PLAIN = {bool, int, float, str, torch.Tensor, type(None)}


@pytest.mark.parametrize("kind", DATASETS)
@pytest.mark.parametrize("order", ["NumPy's", "of one's own"])
def test_a_state_consists_of_numbers_strings_and_tensors(kind: str, order: str) -> None:
    """There are indices of NumPy, batches to be made again, and a sampler that draws from any global generator."""
    sampler = np.arange(SIZE) if order == "NumPy's" else Shuffled()
    options: dict[str, Any] = {"sampler": sampler} if kind == "map" else {}
    with loader_of(kind, num_workers=2, worker_config=WorkerConfig(snapshot_every_n_steps=3), **options) as loader:
        iterator = iter(loader)
        for _ in range(5):
            next(iterator)
        found = leaves(kept(loader.state_dict()))
    assert {type(value) for value in found.values()} <= PLAIN
    assert kind == "stream" or any("again" in path for path in found)


def test_a_loaded_state_is_returned_until_the_first_iter() -> None:
    with loader_of("map") as loader:
        next(iter(loader))
        state = loader.state_dict()
    with loader_of("map") as loader:
        loader.load_state_dict(state)
        assert saved(loader.state_dict()) == saved(state)


def test_a_loader_starts_anew_after_state_dict_and_close() -> None:
    loader = loader_of("map", num_workers=1)
    loader.state_dict()
    loader.close()
    assert len(list(loader)) == 10
    loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_state_dict_in_a_subclass_changes_no_batch_twice(workers: int) -> None:
    class Doubled(DpexDataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:
            for batch in super().__iter__():
                yield 2 * batch

    with Doubled(range(4), batch_size=2, num_workers=workers) as loader:
        assert loader.state_dict()["batches"] == 0
        assert [batch.tolist() for batch in loader] == [[0, 2], [4, 6]]


def numbers(count: int = 24) -> TensorDataset:
    return TensorDataset(torch.arange(count))


@pytest.mark.parametrize(
    ("options", "both"),
    [
        ({"dataset": Augmented()}, r"dataset TensorDataset.*dataset Augmented"),
        ({"dataset": numbers(25)}, r"of 24 samples.*has 25"),
        ({"batch_size": 6}, r"batch_size=4.*batch_size=6"),
        ({"drop_last": True}, r"drop_last=False.*drop_last=True"),
        ({"generator": torch.Generator().manual_seed(8)}, r"seed .*7.*seed .*8"),
        ({"shuffle": False}, r"RandomSampler.*SequentialSampler"),
        ({"seeding": "worker"}, r"seeding='batch'.*seeding='worker'"),
    ],
)
def test_a_state_of_another_loader_is_refused_with_both_values(options: dict[str, Any], both: str) -> None:
    def made(**changed: Any) -> DpexDataLoader[Any]:
        usual = {"batch_size": 4, "shuffle": True, "generator": torch.Generator().manual_seed(7), "seeding": "batch"}
        return DpexDataLoader(**{"dataset": numbers(), **usual, **changed})

    loader = made()
    iter(loader)
    with pytest.raises(StateError, match=both):
        made(**options).load_state_dict(loader.state_dict())


def test_logical_workers_are_the_same_number_or_it_is_an_error() -> None:
    with loader_of("map", num_workers=2) as loader:
        state = loader.state_dict()
    with pytest.raises(StateError, match=r"num_workers=2.*num_workers=3.*seeding='batch'"):
        loader_of("map", num_workers=3).load_state_dict(state)


@pytest.mark.parametrize(
    ("state", "why"),
    [
        ({"_snapshot": {}}, r"version None.*'_snapshot'"),
        ({"version": 2}, "version 2"),
        ({"version": 1}, "does not say which loader"),
        ([1], r"load_state_dict\(\[1\]\): it is no state"),
        (None, r"load_state_dict\(None\): it is no state"),
        ({}, r"load_state_dict\(\{\}\): it is no state. Give what state_dict\(\) of a loader returned"),
    ],
)
def test_what_is_no_state_of_this_release_is_refused(state: Any, why: str) -> None:
    with loader_of("map", num_workers=1, persistent_workers=True) as loader:
        next(iter(loader))
        iterator = iterator_of(loader)
        with pytest.raises(StateError, match=why):
            loader.load_state_dict(state)
        assert iterator_of(loader) is iterator, "the loader is as it was"


@pytest.mark.parametrize(
    "damage",
    [
        *({"start": damaged} for damaged in (None, {"generators": {"loader": "!"}}, {"shared": {"torch": None}})),
        *({"base_seed": "x"}, {"workers": [{"random": "eval"}]}),
    ],
    ids=str,
)
def test_a_damaged_state_is_refused_before_anything_happens(damage: dict[str, Any]) -> None:
    loader = loader_of("map", seeding="batch")
    state = {**loader.state_dict(), **damage}
    with pytest.raises(StateError, match="cannot be read"):
        loader.load_state_dict(state)
    assert len(list(loader)) == 10


@pytest.mark.parametrize("name", ["python", "numpy", "torch"])
def test_a_state_that_a_generator_would_refuse_is_refused(name: str) -> None:
    with loader_of("map", num_workers=1) as loader:
        state = kept(loader.state_dict())
    states = global_states()
    state["workers"][0]["random"] = {**states, name: states["numpy" if name == "torch" else "torch"]}
    with pytest.raises(StateError, match="cannot be read"):
        loader_of("map", num_workers=1).load_state_dict(state)


def test_a_state_restarts_the_epoch_where_torch_makes_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.platform", "darwin")
    loader = loader_of("map")
    next(iter(loader))
    state = kept(loader.state_dict())
    with pytest.warns(RuntimeWarning, match="begins anew.*this is darwin"):
        assert len(resumed(loader, state)) == 10
