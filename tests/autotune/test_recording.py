"""Real runs are recorded, each into a file of its own, and nothing about that can disturb training."""

import gc
import logging
import os
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from families import Augmented, train_until
from forks import in_a_child
from waiting import until

from benchmarks.simulation.replay import load, main
from benchmarks.simulation.replay import replay as replayed
from dpex import AutotuneConfig, DpexDataLoader
from dpex.autotune.runtime.trace import VARIABLE, Recorder, TraceFile, check, wanted
from dpex.errors import OptionError
from dpex.measure.reading import Reading

ENDLESS = 10**7
QUICK = AutotuneConfig(interval_s=0.1, shrink_after=1)


def slow_work(**options: Any) -> Any:
    return DpexDataLoader(Augmented(ENDLESS, 0.003), batch_size=8, num_workers="auto", **options)


def has_lines(path: Path, count: int) -> Callable[[], bool]:
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= count


def test_a_run_is_recorded_and_replays(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with slow_work(autotune=replace(QUICK, trace=str(path))) as loader:
        train_until(lambda: any(decision.outcome for decision in loader.decisions), loader, iter(loader))
    trace = load(str(path))
    assert list(trace.decisions) == loader.decisions
    assert trace.header.machine["pid"] == os.getpid()
    assert abs(trace.header.started_s - time.time()) < 120
    assert trace.sections[0].origin.config.interval_s == QUICK.interval_s
    assert any(window.local.services_s for window in trace.windows)
    assert all(window.is_same for window in replayed(trace))
    assert main([str(path)]) == 0


def test_the_environment_names_a_file_and_epochs_share_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "run-{pid}-{rank}.jsonl"))
    monkeypatch.setenv("RANK", "3")
    data, kept = Augmented(400, 0.001), {"persistent_workers": True}  # starting them would be a limit, with a section
    loader = DpexDataLoader(data, batch_size=4, num_workers="auto", autotune=QUICK, **kept)
    assert list(tmp_path.iterdir()) == []  # nothing before the first window
    assert len(list(loader)) == 100
    (path,) = tmp_path.iterdir()
    end = load(str(path)).windows[-1].at
    assert path.name == f"run-{os.getpid()}-3.jsonl"
    until(lambda: len(list(loader)) == 100 and load(str(path)).windows[-1].at > end)
    assert list(tmp_path.iterdir()) == [path]
    assert len(load(str(path)).sections) == 1


def test_the_configuration_goes_before_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "environment"))
    assert wanted(AutotuneConfig(trace=str(tmp_path / "option")), os.environ) == tmp_path / "option"
    assert wanted(AutotuneConfig(), os.environ) == tmp_path / "environment"
    assert wanted(AutotuneConfig(), {VARIABLE: ""}) is None


def test_resize_is_on_record(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    with slow_work(autotune=replace(QUICK, trace=str(path))) as loader:
        iterator = iter(loader)
        while not has_lines(path, 3)():
            next(iterator)
        loader.resize(local=3)
        while "renewed" not in path.read_text():
            next(iterator)
        loader.resize(remote=0, prefetch=5)
        while path.read_text().count("renewed") < 2:
            next(iterator)
    first, second, third = load(str(path)).sections
    assert first.origin.why == ""
    assert second.origin.why == "local=3 is fixed by resize()"
    assert (second.origin.limits.least_local, second.origin.limits.local) == (3, 3)
    assert second.origin.start.local == 3
    assert third.origin.limits == second.origin.limits.fixed(remote=0, prefetch=5)
    assert not third.steps


def test_a_fixed_number_of_workers_records_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(tmp_path / "missing" / "trace.jsonl"))
    assert len(list(DpexDataLoader(Augmented(40), num_workers=1))) == 40


def test_a_forked_child_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    loader = slow_work(autotune=replace(QUICK, trace=str(path)))
    train_until(has_lines(path, 3), loader, iter(loader))
    loader.close()
    gc.collect()
    before = path.read_bytes()

    def train_in_a_child() -> None:
        windows: list[Reading] = []
        tell = Recorder.window
        Recorder.window = lambda self, window: (windows.append(window), tell(self, window))  # type: ignore[method-assign]
        train_until(lambda: len(windows) > 3, loader, iter(loader))

    in_a_child(train_in_a_child)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_file_that_is_gone_does_not_disturb_training(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.jsonl"
    with slow_work(autotune=replace(QUICK, trace=str(path))) as loader:
        iterator = iter(loader)
        while not has_lines(path, 2)():
            next(iterator)
        path.unlink()
        while "cannot be written to" not in caplog.text:
            next(iterator)
        while not loader.decisions:
            next(iterator)
    assert sum("cannot be written to" in record.message for record in caplog.records) == 1
    assert "tuning goes on" in caplog.text
    assert not path.exists()


@pytest.mark.parametrize(("name", "problem"), [("missing/trace.jsonl", "there is no folder"), (".", "is no file")])
@pytest.mark.parametrize("by_option", [True, False])
def test_a_bad_name_is_refused_before_training(
    name: str, problem: str, by_option: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    path = os.path.join(tmp_path, name)  # noqa: PTH118  (pathlib would drop the ".")
    if not by_option:
        monkeypatch.setenv(VARIABLE, path)
    config = AutotuneConfig(trace=path) if by_option else None
    with pytest.raises(OptionError, match=problem) as caught:
        DpexDataLoader([1, 2], num_workers="auto", autotune=config)
    assert str(caught.value).startswith("AutotuneConfig(trace=" if by_option else f"{VARIABLE}=")
    assert "give a file in a folder that exists" in str(caught.value)


def test_a_folder_that_may_not_be_written_to_is_refused() -> None:
    """Tried by nobody in particular, as root may write everywhere."""

    def check_it() -> None:
        if os.geteuid() == 0:
            os.setuid(65534)
        with pytest.raises(OptionError, match="no file can be made in"):
            check(AutotuneConfig(trace=f"{folder}/trace.jsonl"), {})

    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o555)  # noqa: PTH101
        in_a_child(check_it)


def test_a_full_disk_leaves_what_was_whole(tmp_path: Path) -> None:
    """A limit on the size of files is met as a full disk is: a line is written in part, and no more after that."""
    path = tmp_path / "trace.jsonl"

    def write() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        said: list[str] = []
        logging.getLogger("dpex").addFilter(lambda record: said.append(record.levelname) or False)
        file = TraceFile(path)
        for _ in range(4):
            file.write({"kind": "x" * 600})
        assert said == ["WARNING"]

    in_a_child(write)
    text = path.read_bytes()
    assert len(text) == 1000
    assert text.count(b"\n") == 1


def test_what_cannot_be_written_down_ends_recording_only(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = TraceFile(tmp_path / "t")
    for value in (1, object(), 2):
        file.write({"kind": value})
    assert (tmp_path / "t").read_text() == '{"kind":1}\n'
    assert sum(record.levelname == "WARNING" for record in caplog.records) == 1


def test_a_link_that_was_put_in_its_place_is_not_followed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, other = TraceFile(tmp_path / "run.jsonl"), tmp_path / "other"
    file.write({"a": 1})
    other.write_text("others'")
    file.path.unlink()
    file.path.symlink_to(other)
    file.write({"b": 2})
    assert other.read_text() == "others'"
    assert "cannot be written to" in caplog.text


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    for name in ("t.jsonl", "t-2.jsonl"):
        (tmp_path / name).write_text("mine")
    file = TraceFile(tmp_path / "t.jsonl")
    file.write({"kind": "header"})
    assert file.path.name == "t-3.jsonl"
    assert {path.name: path.read_text() for path in tmp_path.iterdir() if path != file.path} == {
        "t.jsonl": "mine",
        "t-2.jsonl": "mine",
    }
