"""Trainings that share batches, as real processes: each batch made once, the same for all, whoever is late or dies."""

import errno
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from families import is_alive
from torch.utils.data import ChainDataset
from trainings import BATCH, SAMPLES, SHARE, Noted, Seen, Training, alone, loader_of, notes_in
from waiting import until

from dpex import DpexDataLoader, OptionError, ShareError, WorkerDiedError
from dpex.options import WorkerConfig
from dpex.pools.share import nodes, opening
from dpex.pools.share.meeting import MeetingPlace
from dpex.pools.share.opening import Share

BATCHES = SAMPLES // BATCH
PATIENCE_S = 60.0
"""For what ends by itself, on a machine that is busy."""
Begin = Callable[..., Training]


@pytest.fixture(autouse=True)
def place() -> Iterator[None]:
    """Afterwards nobody listens where trainings of these tests meet."""
    addresses = {f"@{MeetingPlace(share_of(passes).key({})).address[1:]}" for passes in range(3)}
    yield
    until(lambda: not addresses & set(Path("/proc/net/unix").read_text().split()), PATIENCE_S)


def share_of(passes_before: int) -> Share:
    return Share(name=SHARE, kept_bytes=0, passes_before=passes_before)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    return tmp_path / "notes"


@pytest.fixture
def begin(notes: Path) -> Iterator[Begin]:
    """Begins a training; all have ended when the test has."""
    trainings: list[Training] = []

    def begin_one(dataset: Any = None, **options: Any) -> Training:
        trainings.append(Training(dataset or Noted(notes), **options))
        return trainings[-1]

    yield begin_one
    for training in trainings:
        training.close()
    until(lambda: not _running(notes), PATIENCE_S)


def _running(notes: Path) -> set[int]:
    """Processes of workers, and what they were forked from, which end with their producer."""
    there = {note.worker for note in notes_in(notes)} | {note.template for note in notes_in(notes)}
    return {pid for pid in there if is_alive(pid)}


def _producer(notes: Path) -> psutil.Process:
    """The one that has the workers which made the latest sample."""
    return psutil.Process(psutil.Process(notes_in(notes)[-1].template).ppid())


def _calls(notes: Path) -> Counter[int]:
    return Counter(note.index for note in notes_in(notes))


def _all_of(trainings: list[Training], before: list[list[Seen]] | None = None) -> list[list[Seen]]:
    """What each of them gets, at the same time: all are connected before any goes on."""
    got = before or [training.take(1) for training in trainings]
    for training in trainings:
        training.begin()
    return [early + training.end() for early, training in zip(got, trainings, strict=True)]


def _expected(tmp_path: Path, epochs: int = 1, **options: Any) -> Any:
    return alone(Noted(tmp_path / "other notes"), epochs, **options)


@pytest.mark.parametrize("context", ["fork", "forkserver", "spawn"])
def test_each_batch_is_made_once_and_is_the_same_for_all(
    begin: Begin, notes: Path, tmp_path: Path, context: str
) -> None:
    trainings = [begin(multiprocessing_context=context) for _ in range(3)]
    assert _all_of(trainings) == [_expected(tmp_path)] * 3
    assert _calls(notes) == Counter(range(SAMPLES))
    assert sum(training.shared for training in trainings) == 2 * BATCHES
    assert not any(training.said_of_share for training in trainings)


def test_trainings_that_ignore_sigchld_share(begin: Begin, notes: Path, tmp_path: Path) -> None:
    """They do not learn how the process ended that started the producer."""
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        trainings = [begin(), begin()]
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert _all_of(trainings) == [_expected(tmp_path)] * 2
    assert _calls(notes) == Counter(range(SAMPLES))
    assert not any(training.said_of_share for training in trainings)


def test_late_training_gets_what_is_kept(begin: Begin, notes: Path, tmp_path: Path) -> None:
    first = begin()
    got = first.take(BATCHES - 1)
    late = begin()
    assert late.take() == got + first.take() == _expected(tmp_path)
    assert _calls(notes) == Counter(range(SAMPLES))


@pytest.mark.parametrize("before", [0, 2])
def test_training_too_far_behind_has_its_batches_made_again(
    begin: Begin, notes: Path, tmp_path: Path, before: int
) -> None:
    """Whether it comes late or is slow: the other goes on without it."""
    fast, slow = (begin(worker_config=WorkerConfig(share=SHARE, share_bytes=1), prefetch_factor=1) for _ in range(2))
    got = slow.take(before) if before else []
    expected = _expected(tmp_path)
    assert fast.take(BATCHES - 1) == expected[:-1]
    assert got + slow.take() == expected
    assert fast.take() == expected[-1:]
    assert sum(_calls(notes).values()) > SAMPLES


def test_killed_training_holds_nobody_up(begin: Begin, notes: Path, tmp_path: Path) -> None:
    """It is the one from which the producer was forked, which ends with the other."""
    killed = begin()
    killed.take(1)
    producer = _producer(notes)
    other = begin()
    got = other.take(2)
    killed.kill()
    assert got + other.take() == _expected(tmp_path)
    assert _calls(notes) == Counter(range(SAMPLES))
    until(lambda: not is_alive(producer.pid), PATIENCE_S)


def test_killed_producer_is_replaced(begin: Begin, notes: Path, tmp_path: Path) -> None:
    trainings = [begin(), begin(), begin()]
    got = [training.take(3) for training in trainings]
    _producer(notes).kill()
    assert _all_of(trainings, got) == [_expected(tmp_path)] * 3
    assert sum(_calls(notes).values()) <= 2 * SAMPLES


def test_killed_worker_is_made_good(begin: Begin, notes: Path, tmp_path: Path) -> None:
    trainings = [begin(), begin()]
    got = [training.take(2) for training in trainings]
    os.kill(notes_in(notes)[-1].worker, signal.SIGKILL)
    assert _all_of(trainings, got) == [_expected(tmp_path)] * 2


@pytest.mark.parametrize("persistent", [False, True])
def test_passes_are_shared_one_by_one(begin: Begin, notes: Path, tmp_path: Path, persistent: bool) -> None:
    trainings = [begin(epochs=2, persistent_workers=persistent) for _ in range(2)]
    for training in trainings:
        training.begin()
    expected = _expected(tmp_path, 2) if not persistent else None
    one, other = (training.end() for training in trainings)
    assert one == other
    assert expected is None or one == expected
    for at in (0, BATCHES):
        assert Counter(i for batch in one[at : at + BATCHES] for i in batch.indices) == Counter(range(SAMPLES))


def test_error_of_a_sample_comes_to_all(begin: Begin, notes: Path) -> None:
    dataset = Noted(notes, fails_at=BATCH)
    trainings = [begin(dataset, shuffle=False), begin(dataset, shuffle=False)]
    for training in trainings:
        training.take(1)
    for training in trainings:
        training.begin()
    for training in trainings:
        with pytest.raises(LookupError, match=f"no sample {BATCH}"):
            training.end()
    assert _calls(notes)[BATCH] == 1


@pytest.mark.parametrize(
    ("other", "texts"),
    [
        ({"seed": 2}, ("the base seed of this training is", "torch.manual_seed")),
        ({"dataset": (SAMPLES + 4,)}, (f"is {SAMPLES + 4}, and", f"is {SAMPLES}.")),
        ({"collate_fn": list}, ("the collate_fn of this training is builtins.list", "default_collate")),
    ],
)
def test_trainings_that_do_not_read_the_same_are_told_both(
    begin: Begin, notes: Path, other: dict[str, Any], texts: tuple[str, ...]
) -> None:
    begin().take(1)
    options = dict(other)
    dataset = Noted(notes, *options.pop("dataset", ()))
    with pytest.raises(ShareError) as raised:
        begin(dataset, **options).take()
    for text in (f"share={SHARE!r}", *texts):
        assert text in str(raised.value)


class _From(torch.utils.data.Sampler[int]):
    """All samples, from the ``start`` on. What it was made with cannot be seen."""

    def __init__(self, start: int) -> None:
        self._hidden = [(start + at) % SAMPLES for at in range(SAMPLES)]

    def __iter__(self) -> Iterator[int]:
        return iter(self._hidden)

    def __len__(self) -> int:
        return SAMPLES


def test_other_order_is_told(notes: Path) -> None:
    with loader_of(Noted(notes), shuffle=None, sampler=_From(0)) as one:
        batches = iter(one)
        next(batches)
        text = r"batch 0 of epoch 0 has the samples \[5, 6, 7, 8\].*\[0, 1, 2, 3\]"
        with loader_of(Noted(notes), shuffle=None, sampler=_From(5)) as other, pytest.raises(ShareError, match=text):
            next(iter(other))


def test_loader_without_workers_does_not_share(notes: Path) -> None:
    """`unit/test_options.py` has the options that exclude each other without a dataset."""
    with pytest.raises(OptionError, match="num_workers=0"):
        loader_of(Noted(notes), num_workers=0)


def test_streams_are_not_shared() -> None:
    with pytest.raises(OptionError, match="IterableDataset"):
        DpexDataLoader(ChainDataset([]), num_workers=2, worker_config=WorkerConfig(share=SHARE))


def test_training_without_a_producer_says_why(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no other can be started: a limit on processes, say."""
    with loader_of(Noted(notes)) as loader:
        batches = iter(loader)
        next(batches)
        monkeypatch.setattr(opening, "start_producer", _cannot_start)
        _producer(notes).kill()
        with pytest.raises(WorkerDiedError, match="there can be no other: no more processes; without share="):
            list(batches)


def test_training_that_can_read_no_batch_says_why(notes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the system lets no process look into another one."""

    def refuses(*_: Any) -> Any:
        raise PermissionError(errno.EACCES, "not permitted here")

    monkeypatch.setattr(nodes, "copied", refuses)
    with (
        loader_of(Noted(notes)) as loader,
        pytest.warns(match="could not be read: .*not permitted here"),
        pytest.raises(WorkerDiedError, match="ended before a batch arrived; without share="),
    ):
        list(loader)


def _cannot_start(*_: Any) -> None:
    raise ShareError("no more processes")


def test_stats_and_diagnosis_tell_what_another_training_had_made(notes: Path) -> None:
    with loader_of(Noted(notes)) as first:
        batches = iter(first)
        for _ in range(BATCHES - 1):
            next(batches)
        with loader_of(Noted(notes)) as second:
            for _ in second:
                pass
            assert second.stats().pools["local"].shared >= BATCHES - 1
            assert "batches were made for another training with the same share" in second.diagnose().full
