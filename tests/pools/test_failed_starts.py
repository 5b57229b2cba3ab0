"""Workers that end before their first batch: one message with the cause, and no word of going on before an end."""

import os
import re
import signal
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from families import Of
from programs import ran

from dpex import DpexDataLoader
from dpex.errors import WorkerDiedError

UNGUARDED = """
import warnings
from dpex import DpexDataLoader, WorkerDiedError
warnings.simplefilter("error")
for method in ("spawn", "forkserver"):
    for workers in ("auto", 2):
        try:
            for batch in DpexDataLoader(list(range(8)), num_workers=workers, multiprocessing_context=method):
                print("trains", flush=True)
        except WorkerDiedError as error:
            print(__name__, "if __name__ == '__main__':" in str(error), "unguarded.py" in str(error), flush=True)
"""
RANKS = """
import torch.multiprocessing
from dpex import DpexDataLoader

def train(rank):
    for workers in ("auto", 2):
        loader = DpexDataLoader(list(range(8)), 4, num_workers=workers, multiprocessing_context="spawn")
        print([batch.tolist() for batch in loader], loader.num_workers > 0, flush=True)

if __name__ == "__main__":
    torch.multiprocessing.spawn(train, nprocs=1)
"""


def output_of(script: str, path: Path) -> str:
    path.write_text(script)
    done = ran(path)
    return done.stdout + done.stderr


def test_no_worker_becomes_a_training_that_lacks_a_main_guard(tmp_path: Path) -> None:
    assert output_of(UNGUARDED, tmp_path / "unguarded.py").splitlines() == ["__main__ True True"] * 4


def test_a_rank_that_was_spawned_has_workers(tmp_path: Path) -> None:
    assert output_of(RANKS, tmp_path / "ranks.py").splitlines() == ["[[0, 1, 2, 3], [4, 5, 6, 7]] True"] * 2


class Ends:
    """A ``worker_init_fn`` that ends workers from a number on."""

    def __init__(self, first: int, how: Any) -> None:
        self.first, self.how = first, how

    def __call__(self, worker: int) -> None:
        if worker >= self.first:
            self.how()


def exit_with_3() -> None:
    sys.exit(3)


def be_killed() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail() -> None:
    raise OSError(24, "too many\nof mine")


ENDS = {exit_with_3: "exited unexpectedly with exit code 3 before its first", be_killed: r"Killed .*before its first"}


@pytest.mark.parametrize("options", [{}, {"seeding": "batch"}, {"num_workers": "auto"}], ids=str)
@pytest.mark.parametrize("how", ENDS)
def test_an_init_function_that_ends_every_worker_is_one_error(how: Any, options: dict[str, Any]) -> None:
    loader = DpexDataLoader(range(8), **{"num_workers": 2, "worker_init_fn": Ends(0, how), **options})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with pytest.raises(WorkerDiedError, match=f"^no local worker can be started: .*{ENDS[how]}"):
            list(loader)
    assert ["Another one is started" in str(warning.message) for warning in caught] == [True] * (how is be_killed)


ADDED = {
    exit_with_3: ENDS[exit_with_3],
    fail: r"^OSError: \[Errno 24\] too many\nof mine \(raised by worker_init_fn\(\d\) in a worker that dpex added",
}


@pytest.mark.parametrize("how", ADDED)
def test_an_init_function_that_ends_added_workers_is_one_warning(how: Any) -> None:
    loader = DpexDataLoader(range(1 << 16), num_workers=2, seeding="batch", worker_init_fn=Ends(2, how))
    with warnings.catch_warnings(record=True) as caught, loader:
        warnings.simplefilter("always")
        iterator = iter(loader)
        made = [next(iterator)]
        loader.resize(local=5)
        counts = iterator._engine.pool("local").counts
        while (counts.most, counts.requested) != (2, 2):
            made.append(next(iterator))
    assert torch.cat(made).tolist() == list(range(len(made)))
    (said,) = [str(warning.message) for warning in caught]
    assert re.search(ADDED[how], said)
    assert "ulimit" not in said


def exits_at(index: int) -> int:
    os._exit(3)


@pytest.mark.filterwarnings("ignore:DataLoader worker:RuntimeWarning")
@pytest.mark.parametrize("persistent", [False, True])
def test_a_loop_that_goes_on_after_all_workers_died_ends(persistent: bool) -> None:
    loader: DpexDataLoader[Any] = DpexDataLoader(Of(exits_at, 64), num_workers=1, persistent_workers=persistent)
    for _ in range(2):
        iterator, errors = iter(loader), 0
        for _ in range(70):
            with pytest.raises((WorkerDiedError, StopIteration)) as caught:
                next(iterator)
            errors += isinstance(caught.value, WorkerDiedError)
        assert errors > 1
    loader.close()
