"""Random generators that a dataset has of its own: which are found, and what is drawn from them."""

import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import kept
from families import kill, seeded, setup_of, worker_pids
from torch.utils.data import DataLoader, Dataset
from workload import wait_as_work

from dpex import DpexDataLoader, StateError, decode_in_workers
from dpex.options import WorkerConfig
from dpex.worker.core import WorkerCore
from dpex.worker.own_generators import OwnGenerators

pytestmark = pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")


class Jitter:
    """A transform with generators that every copy has; one belongs to the class, as MONAI's does."""

    shared = np.random.RandomState(2)

    def __init__(self) -> None:
        self.rng = random.Random(1)
        self.more = [
            np.random.default_rng(3),
            np.random.Generator(np.random.MT19937(4)),
            np.random.RandomState(np.random.PCG64(5)),
        ]
        self.torch = torch.Generator().manual_seed(6)

    def __call__(self, value: float) -> list[float]:
        draws = [self.rng.gauss(0, 1), self.shared.randn(), torch.rand((), generator=self.torch).item()]
        return [value, *draws, *(one.standard_normal() for one in self.more)]


class Jittered:
    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.transform(float(index)), dtype=torch.float64)


def drawn(dataset: Any, workers: int) -> list[tuple[float, ...]]:
    torch.manual_seed(5)
    with DpexDataLoader(dataset, 3, num_workers=workers, seeding="batch") as loader:
        return [tuple(sample[1:].tolist()) for _ in range(2) for batch in loader for sample in batch]


def test_draws_are_distinct_and_equal_inline_and_in_workers() -> None:
    dataset = Jittered(Jitter())
    before = OwnGenerators(dataset, None).states()
    here, there = drawn(dataset, 0), drawn(dataset, 2)
    assert here == there
    assert all(len(set(column)) == 24 for column in zip(*here, strict=True))
    after = OwnGenerators(dataset, None).states()
    assert str(after) == str(before), "the training process has its generators back"


def test_what_decodes_a_stream_is_seeded_too() -> None:
    jitter = Jitter()
    dataset = decode_in_workers(range(12), lambda value: torch.tensor(jitter(value)))
    one, two = drawn(dataset, 1), drawn(dataset, 1)
    assert one == two
    assert len(set(one)) == 24
    assert not OwnGenerators(decode_in_workers([random.Random(1)], float), None), "a stream draws as it likes"


def use(rng: random.Random) -> Any:
    return lambda value: rng.random() + value


@pytest.mark.parametrize(
    ("transform", "name"),
    [
        ([float, random.Random()], "Jittered.transform[1]"),
        ({"image": random.Random()}, "Jittered.transform['image']"),
        (partial(map, random.Random()), "Jittered.transform.args[0]"),
        (random.Random().random, None),
        (partial(use, rng=random.Random()), "Jittered.transform.keywords['rng']"),
        (use(random.Random()), "Jittered.transform.rng"),
        (torch.nn.Sequential(torch.nn.Linear(1, 1)), None),
        (list(range(100_000)), None),
        (np.random.mtrand._rand, None),  # type: ignore[attr-defined]
        (random.SystemRandom(), None),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_where_generators_are_found(transform: Any, name: str | None) -> None:
    assert list(OwnGenerators(Jittered(transform), None).states()) == ([] if name is None else [name])


# -- under seeds per worker they go where a logical worker goes: a move, a death, a later run --------------------------


class Noise:
    """A transform with generators of several kinds, some of which keep a second draw."""

    def __init__(self) -> None:
        self.legacy = np.random.RandomState(4)
        self.others = {
            "twister": np.random.Generator(np.random.MT19937(5)),
            "philox": np.random.Generator(np.random.Philox(6)),
            "sfc": np.random.Generator(np.random.SFC64(7)),
        }

    def __call__(self) -> list[float]:
        return [self.legacy.randn(), *(one.random() for one in self.others.values())]


class Drawing(Dataset[torch.Tensor]):
    """Sample ``index``: float64 (9,): the index, a global draw, and draws of generators of its own."""

    def __init__(self, length: int = 60, nap_s: float = 0.0) -> None:
        self.length, self.nap_s = length, nap_s
        self.python, self.numpy = random.Random(1), np.random.default_rng(2)
        self.torch = torch.Generator().manual_seed(3)
        self.noise = Noise()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.nap_s:
            wait_as_work(self.nap_s)
        own = [self.python.gauss(0, 1), self.numpy.random(), torch.rand((), generator=self.torch).item()]
        return torch.tensor([index, random.random(), *own, *self.noise()], dtype=torch.float64)


class SeededByInit(Drawing):
    def reseed(self, number: int) -> None:
        """As many users do, who want other draws of each worker."""
        self.numpy = np.random.default_rng(number)


def core_of(dataset: Any, **changes: Any) -> WorkerCore:
    return WorkerCore(setup_of(dataset, **changes))


def made(core: WorkerCore, logical: int, numbers: range) -> list[Any]:
    return [core.make(number, [number, number + 1], logical, 0)[0].tolist() for number in numbers]


@pytest.fixture(autouse=True)
def global_generators_are_put_back() -> Any:
    python, numpy, of_torch = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python)
    np.random.set_state(numpy)
    torch.set_rng_state(of_torch)
    torch.utils.data._utils.worker._worker_info = None


@pytest.mark.parametrize("kind", [Drawing, SeededByInit])
def test_logical_workers_sharing_a_worker_draw_as_if_alone(kind: Callable[[], Any]) -> None:
    def setup() -> tuple[Any, dict[str, Any]]:
        dataset = kind()
        return dataset, {"worker_init_fn": dataset.reseed} if kind is SeededByInit else {}

    alone = []
    for logical in range(2):
        dataset, more = setup()
        core = core_of(dataset, **more)
        core.adopt(logical)
        alone.append(made(core, logical, range(logical, 20, 2)))
    dataset, more = setup()
    shared = core_of(dataset, **more)
    shared.adopt(0)
    got: list[list[Any]] = [made(shared, 0, range(0, 6, 2)), []]
    shared.adopt(1)
    for turn in range(4):
        got[1] += made(shared, 1, range(2 * turn + 1, 2 * turn + 2))
        got[0] += made(shared, 0, range(2 * turn + 6, 2 * turn + 7))
    assert got == [alone[0][:7], alone[1][:4]]


@pytest.mark.parametrize("deaths", [{0}, {70, 110}])
def test_a_death_is_replayed_to_torchs_own_bits(deaths: set[int]) -> None:
    """Snapshots come every quarter of a second; this epoch takes several."""
    options: dict[str, Any] = {"batch_size": 2, "num_workers": 2}
    expected = list(DataLoader(Drawing(240), generator=seeded(), **options))
    got = []
    with DpexDataLoader(Drawing(240, 0.005), generator=seeded(), **options) as loader:
        iterator = iter(loader)
        for number, batch in enumerate(iterator):
            got.append(batch)
            if number in deaths:
                kill(worker_pids(iterator)[0])
    assert torch.equal(torch.cat(got), torch.cat(expected))


def resumable(dataset: Any) -> DpexDataLoader[Any]:
    config = WorkerConfig(snapshot_every_n_steps=1)
    return DpexDataLoader(dataset, 3, num_workers=2, generator=seeded(), worker_config=config)


def broken_off(loader: Any, at: int) -> tuple[Any, torch.Tensor]:
    """The state after ``at`` batches, through a checkpoint, and what follows."""
    iterator = iter(loader)
    for _ in range(at):
        next(iterator)
    return kept(loader.state_dict()), torch.cat(list(iterator))


def test_a_run_goes_on_with_them() -> None:
    with resumable(Drawing()) as loader:
        state, rest = broken_off(loader, 7)
    with resumable(Drawing()) as loader:
        loader.load_state_dict(state)
        assert torch.equal(torch.cat(list(loader)), rest)


def test_another_kind_of_generator_is_refused_by_its_name() -> None:
    with resumable(Drawing()) as loader:
        state, _ = broken_off(loader, 7)
    other = Drawing()
    other.numpy = random.Random(1)  # type: ignore[assignment]
    with resumable(other) as loader:
        loader.load_state_dict(state)
        named = r"Drawing\.numpy is a random\.Random, and the state is of another kind"
        with pytest.raises(StateError, match=named):
            next(iter(loader))


class Silent(np.random.PCG64):
    @property
    def state(self) -> Any:
        raise NotImplementedError("it does not tell")


class Elsewhere:
    """Stands for an object that cannot be loaded here."""

    @property
    def __class__(self) -> Any:  # type: ignore[override]
        raise FileNotFoundError("only on another machine")


def test_what_cannot_be_told_or_looked_at_is_left_out() -> None:
    dataset = Drawing()
    dataset.numpy = np.random.Generator(Silent(1))
    assert "Drawing.numpy" not in OwnGenerators(dataset, None).states()
    assert "Drawing.python" in OwnGenerators(dataset, None).states()
    before = OwnGenerators(dataset, None).states().keys()
    dataset.noise = Elsewhere()  # type: ignore[assignment]
    assert OwnGenerators(dataset, None).states().keys() == {
        name for name in before if not name.startswith("Drawing.noise")
    }
