"""What a loader's stand-in takes over, when dpex cannot stand in, and when a stand-in ends."""

import copy
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader
from torch.utils.data.datapipes.iter import IterableWrapper

from dpex import loader_behind
from dpex.loader.served import why_not_served
from dpex.run import served
from dpex.run.run_options import RunOptions
from dpex.run.served import served_iterator, updated_stand_in

TORCHS = DataLoader._get_iterator
NUMBERS = range(12)


@pytest.mark.parametrize(
    ("options", "given", "iterable", "expected"),
    [
        (RunOptions(), 4, False, "auto"),
        (RunOptions(), 0, False, 0),
        (RunOptions(also_in_process=True), 0, False, "auto"),
        (RunOptions(num_workers=3), 8, False, 3),
        (RunOptions(num_workers=3), 0, False, 0),
        (RunOptions(num_workers=3, also_in_process=True), 0, False, 3),
        (RunOptions(num_workers="keep"), 8, False, 8),
        (RunOptions(also_in_process=True), 0, True, 0),
        (RunOptions(num_workers=3), 2, True, 2),
    ],
)
def test_workers_by_what_the_script_gave(options: RunOptions, given: int, iterable: bool, expected: Any) -> None:
    assert options.workers(given, iterable=iterable) == expected


def test_options_travel_as_text() -> None:
    options = RunOptions(num_workers=3, loader={"distribute_mode": "auto", "memory_budget": 10}, script=("a.py", "-x"))
    assert RunOptions.from_text(options.to_text()) == options


def test_a_stand_in_adopts_the_scripts_settings_and_changes() -> None:
    generator = torch.Generator()
    options: dict[str, Any] = {"prefetch_factor": 3, "persistent_workers": True, "in_order": False}
    loader: Any = DataLoader(NUMBERS, 4, True, num_workers=2, generator=generator, timeout=9, **options)
    made = updated_stand_in(loader, RunOptions())
    assert made._is_auto
    assert (made.generator, made.timeout) == (generator, 9)
    assert {name: getattr(made, name) for name in options} == options
    assert made.batch_sampler is loader.batch_sampler
    assert made.seeding == "batch"
    loader.collate_fn = tuple
    assert updated_stand_in(loader, RunOptions()) is made
    assert made.collate_fn is tuple
    assert loader_behind(loader) is made
    loader.multiprocessing_context = "spawn"
    assert updated_stand_in(loader, RunOptions()).multiprocessing_context.get_start_method() == "spawn"
    loader.num_workers = 0
    assert updated_stand_in(loader, RunOptions()).num_workers == 0


def test_a_stand_in_ends_with_its_loader() -> None:
    loader: Any = DataLoader(NUMBERS, num_workers=2)
    made = weakref.ref(updated_stand_in(loader, RunOptions()))
    del loader
    assert made() is None


COPIES = {"copy": copy.copy, "deep copy": copy.deepcopy, "pickle": lambda loader: pickle.loads(pickle.dumps(loader))}


@pytest.mark.parametrize("how", COPIES)
def test_a_copy_has_a_stand_in_and_changes_of_its_own(how: str) -> None:
    loader: Any = DataLoader(NUMBERS, num_workers=2)
    made = updated_stand_in(loader, RunOptions())
    copied = COPIES[how](loader)
    copied.collate_fn = tuple
    assert updated_stand_in(copied, RunOptions()) is not made
    assert updated_stand_in(copied, RunOptions()).collate_fn is tuple
    assert updated_stand_in(loader, RunOptions()).collate_fn is loader.collate_fn


class OwnSampler(DataLoader[Any]):
    @property
    def _index_sampler(self) -> Any:
        return [[1, 2], [3]]


@pytest.mark.parametrize(
    ("loader", "reason"),
    [
        (lambda: DataLoader(IterableWrapper([1, 2, 3])), "DataPipes are left to PyTorch"),
        (lambda: OwnSampler(NUMBERS, batch_size=2), "its class defines _index_sampler"),
    ],
    ids=["datapipe", "own sampler"],
)
def test_a_loader_that_dpex_cannot_serve_is_left_to_torch(
    loader: Any, reason: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "_said", set())
    made = loader()
    assert why_not_served(made) == reason
    batches = [[batch.tolist() for batch in served_iterator(made, TORCHS, RunOptions())] for _ in range(2)]
    assert batches[0] == batches[1] == [batch.tolist() for batch in made]
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("dpex run: PyTorch's own iterators serve a")
    assert lines[0].endswith(reason)
