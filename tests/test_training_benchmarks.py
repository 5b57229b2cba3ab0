"""Whole trainings: every loader trains alike, what a run comes to, and what of it is kept. Nothing is timed."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.course import Course
from benchmarks.training import accuracy, runs, speed, tables
from benchmarks.training.networks import resnet50
from benchmarks.training.pace import Pace, Request, drive
from benchmarks.training.photographs import jittered, normalised_on_device
from benchmarks.training.pictures import load
from benchmarks.training.runs import Run
from benchmarks.training.steps import Sleep
from benchmarks.training.trainer import DEVICES, PLACES, Job, Training, trained

ABOUT = {
    "machine": {"processor": "a CPU", "cores": 2, "gpu": None},
    "versions": {"python": "3.11.7", "torch": "2.13.0", "ray": "2.60.0"},
    "commit": "0123456789abcdef",
    "dirty": False,
    "since": "2026-11-22T10:00:00+00:00",
    "until": "2026-11-22T11:00:00+00:00",
}


@pytest.fixture(autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


# -- training ----------------------------------------------------------------------------------------------------------


def test_every_loader_of_this_machine_trains_alike_where_pictures_are_shifted_at_random() -> None:
    job = Job(devices="single", place="local", seeds=(3,), epochs=2, limit=1, is_shifted=True)
    (local,), (auto,) = trained(job), trained(replace(job, place="auto"))
    assert (local.steps, len(local.losses), len(set(local.losses))) == (2, 2, 2)
    assert (local.curve, local.weights, local.accuracy) == (auto.curve, auto.weights, auto.accuracy)


def test_torchs_loader_and_data_parallel_train_alike_where_nothing_is_drawn() -> None:
    job = Job(devices="single", place="torch", seeds=(0, 1), epochs=1, limit=1)
    torchs, parallel = trained(job), trained(replace(job, devices="data-parallel", place="auto"))
    assert [(one.curve, one.weights) for one in torchs] == [(one.curve, one.weights) for one in parallel]
    assert torchs[0].curve != torchs[1].curve


# -- data and networks -------------------------------------------------------------------------------------------------


def idx(*shape: int) -> bytes:
    values = np.arange(int(np.prod(shape)), dtype=np.uint8).reshape(shape)
    return bytes([0, 0, 8, len(shape)]) + np.array(shape, ">i4").tobytes() + values.tobytes()


def write_fashion(folder: Path) -> None:
    for part, count in (("train", 5), ("t10k", 3)):
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(count, 28, 28)))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(idx(count))


def test_fashion_mnist_is_read_packed_or_not(tmp_path: Path) -> None:
    write_fashion(tmp_path)
    data = load(tmp_path)
    assert (data.name, len(data.train), len(data.test)) == ("FashionMNIST", 5, 3)
    image, label = data.train[1]
    assert (image.shape, label) == ((1, 28, 28), 1)
    assert image[0, 0, 0].item() == pytest.approx(28 * 28 % 256 / 255)


@pytest.mark.parametrize("broken", [b"\0\0\x0d\x01\0\0\0\1\0", idx(3)[:-1]], ids=["another type", "cut short"])
def test_a_file_that_is_no_idx_file_is_refused(tmp_path: Path, broken: bytes) -> None:
    write_fashion(tmp_path)
    (tmp_path / "t10k-labels-idx1-ubyte").write_bytes(broken)
    with pytest.raises(ValueError, match="t10k-labels-idx1-ubyte"):
        load(tmp_path)


def test_resnet50_is_the_usual_one() -> None:
    with torch.device("meta"):
        model = resnet50()
        scores = model(torch.empty(2, 3, 224, 224))
    assert scores.shape == (2, 1000)
    assert sum(parameter.numel() for parameter in model.parameters()) == 25_557_032


def test_colours_change_and_grey_stays_grey() -> None:
    pixels = np.random.default_rng(0)
    image = pixels.integers(0, 256, (8, 8, 3), dtype=np.uint8)
    random.seed(0)
    first, second = jittered(image), jittered(image)
    assert first.shape == image.shape
    assert first.dtype == np.uint8
    assert (first != second).any()
    grey = jittered(np.full((4, 4, 3), 100, np.uint8))
    assert (grey == grey[0, 0, 0]).all()


def test_pictures_are_normalised_on_the_device() -> None:
    images, _ = normalised_on_device((torch.full((1, 3, 2, 2), 255, dtype=torch.uint8), torch.zeros(1)))
    assert images.dtype == torch.bfloat16
    assert images[0, :, 0, 0].tolist() == pytest.approx([2.249, 2.429, 2.640], abs=0.01)


# -- pace --------------------------------------------------------------------------------------------------------------


class Ticking:
    """A clock that each reading, and each step, takes on by a second."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


def test_a_training_is_timed_until_its_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Ticking()
    monkeypatch.setattr("benchmarks.training.pace.time.perf_counter", clock)
    found = drive(range(3), Sleep(0.0), 100.0)
    assert (found.course.batches, found.gpu_stall_s) == (3, None)
    assert (found.course.seconds, found.course.waited_s) == (clock.now - 1.0, 4.0)


def test_contestants_go_through_json() -> None:
    options = speed.parse(["--seconds", "1"])
    everybody = speed.requests(options, has_gpu=False, has_ray=True)
    assert [Request(**json.loads(one.to_json())) for one in everybody] == everybody
    keys = [one.key for one in everybody]
    assert len(set(keys)) == len(keys)
    assert {"photographs limit", "photographs dpex:auto", "waits torch:2", "waits dpex:auto +4 nodes"} <= set(keys)
    assert all(one.work == "photographs" for one in speed.requests(options, has_gpu=True, has_ray=True))


# -- what it comes to --------------------------------------------------------------------------------------------------


def training(seed: int, *, curve: str = "a", right: float = 0.5) -> dict[str, Any]:
    one = Training(
        data="digits", seed=seed, steps=10, seconds=1.0, accuracy=right, losses=(2.0, 1.0), curve=curve, weights="w"
    )
    return asdict(one)


def accuracy_run(**changes: Any) -> Run:
    rows = {f"{devices}:{place}": [training(seed) for seed in range(5)] for devices in DEVICES for place in PLACES}
    rows |= {f"single:{place}:shifted": [training(0, curve="s")] for place in PLACES[1:]}
    settings = {"epochs": 10, "seeds": 5, "limit": None}
    return Run(subject=accuracy.SUBJECT, settings=settings, about=ABOUT, rows={**rows, **changes})


def test_a_loader_that_trains_differently_is_found() -> None:
    assert accuracy.problems(accuracy_run()) == []
    other = [training(seed, curve="b" if seed == 2 else "a") for seed in range(5)]
    assert accuracy.problems(accuracy_run(**{"ddp:auto": other})) == ["ddp:torch and ddp:auto differ with seed 2"]


def test_the_table_of_accuracy() -> None:
    rows = {
        "single:local": [training(seed, right=0.5 + seed / 100, curve="b" if not seed else "a") for seed in range(5)]
    }
    lines = tables.accuracy_table(accuracy_run(**rows)).splitlines()
    assert len(lines) == 2 + len(DEVICES) * len(PLACES)
    assert (
        lines[3] == "| 52.00 (±1.58) | 1.0000 (±0.0000) | single device | dpex, 2 workers | torch's in 4 of 5 seeds |"
    )
    assert "digits, 10 epochs" in tables.accuracy_text(accuracy_run())
    short = tables.accuracy_short(accuracy_run(**rows)).splitlines()
    assert len(short) == 2 + len(DEVICES)
    assert short[2].split(" | ")[2] == "52.00"


def pace(rate: float, waited: float = 0.5, stall: float | None = None) -> dict[str, Any]:
    course = Course(batches=int(10 * rate), seconds=10.0, waited_s=10.0 * waited, marks=((5.0, int(5 * rate)),))
    return Pace(course=course, gpu_stall_s=stall).as_dict()


def speed_run(gpu: str | None = None) -> Run:
    stall = None if gpu is None else 2.5
    rows = {
        "photographs limit": [pace(20)] * 3,
        "photographs torch:1": [pace(4, stall=stall)] * 3,
        "photographs torch:2": [pace(8, stall=stall)] * 3,
        "photographs dpex:auto": [pace(rate, stall=stall) for rate in (12, 10, 16)],
        "waits limit": [pace(80)] * 3,
        "waits torch:2": [pace(8)] * 3,
        "waits dpex:auto +1 nodes": [pace(32)] * 3,
    }
    settings = {"seconds": 15.0, "rounds": 3, "batches": dict.fromkeys(rows, 10)}
    about = ABOUT | {"machine": {"processor": "a CPU", "cores": 2, "gpu": gpu}}
    return Run(subject=speed.SUBJECT, settings=settings, about=about, rows=rows)


def test_the_table_of_speed_has_the_best_of_torchs() -> None:
    lines = tables.speed_table(speed_run()).splitlines()[2:]
    assert [line.split(" | ")[1] for line in lines] == [
        "torch, best: 2 workers",
        'dpex, `"auto"`, this machine',
        "torch, best: 2 workers",
        'dpex, `"auto"`, this machine and 1 further node',
    ]
    assert lines[1].endswith("| 120 (100 to 160) | 120 (100 to 160) | 50% (50% to 50%) | 60% (50% to 80%) |")
    assert "GPU stall" not in tables.speed_table(speed_run())
    assert "The limit, with one batch again and again: 200/s" in tables.speed_text(speed_run())


def test_with_a_gpu_its_stall_is_a_column() -> None:
    header, _, *lines = tables.speed_table(speed_run(gpu="a GPU")).splitlines()
    assert "| GPU stall |" in header
    assert lines[1].endswith("| 50% (50% to 50%) | 25% (25% to 25%) | 60% (50% to 80%) |")


# -- runs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("made", [accuracy_run, speed_run])
def test_a_run_is_kept_as_it_is(tmp_path: Path, made: Callable[[], Run]) -> None:
    assert runs.keep(made(), "one", lambda run: [], tmp_path) == []
    assert runs.newest(made().subject, tmp_path) == replace(made(), rows=json.loads(json.dumps(made().rows)))
    assert runs.newest("another", tmp_path) is None


def test_what_cannot_be_quoted_is_not_kept(tmp_path: Path) -> None:
    dirty = replace(accuracy_run(), about=ABOUT | {"dirty": True})
    assert runs.keep(dirty, "one", accuracy.problems, tmp_path)
    assert runs.keep(accuracy_run(**{"ddp:auto": []}), "one", accuracy.problems, tmp_path)
    short = replace(speed_run(), settings={**speed_run().settings, "seconds": 1.0})
    assert runs.keep(short, "one", speed.problems, tmp_path) == ["its windows are shorter than 15 s"]
    assert list(tmp_path.iterdir()) == []


def test_the_newest_of_a_subject_is_quoted(tmp_path: Path) -> None:
    for name, until in (("a", "2026-11-23"), ("b", "2026-11-22")):
        runs.keep(replace(accuracy_run(), about=ABOUT | {"until": until}), name, lambda run: [], tmp_path)
    newest = runs.newest(accuracy.SUBJECT, tmp_path)
    assert newest is not None
    assert newest.day == "2026-11-23"


def test_a_run_goes_on_with_its_file_on_the_same_commit_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = ["one"]
    monkeypatch.setattr(runs, "commit", lambda root: (head[0], False))
    path = tmp_path / "run.json"
    run = runs.with_row(runs.begun("speed", {"rounds": 1}, path), "a row", [1, 2])
    runs.write(run, path)
    assert runs.begun("speed", {"rounds": 1}, path) == run
    assert runs.begun("speed", {"rounds": 2}, path).rows == {}
    head[0] = "two"
    assert runs.begun("speed", {"rounds": 1}, path).rows == {}


def test_the_command_trains_two_ranks(tmp_path: Path) -> None:
    """Which end with the same weights; it refuses to keep so little."""
    path = tmp_path / "run.json"
    limits = ["--limit", "1", "--epochs", "1", "--seeds", "1"]
    assert accuracy.main([*limits, "--only", "ddp:local", "--results", str(path)]) == 0
    found = runs.read(path)
    (told,) = accuracy.trainings(found, "ddp:local")
    assert (told.steps, told.data) == (1, "scikit-learn's digits")
    assert "epochs were cut short by --limit" in runs.keep(found, "x", accuracy.problems, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.mark.parametrize("subject", [accuracy, speed], ids=["accuracy", "speed"])
def test_what_is_kept_can_be_quoted(subject: Any) -> None:
    kept = [runs.read(path) for path in sorted(runs.KEPT.glob("*.json"))]
    mine = [run for run in kept if run.subject == subject.SUBJECT]
    assert [why for run in mine for why in subject.problems(run)] == []
