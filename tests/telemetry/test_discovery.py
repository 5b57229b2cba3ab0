"""Processes are found by their files, and nobody is found who is no more."""

import json
import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
from waiting import until

from dpex import DpexDataLoader
from dpex.system.directories import announcement_directories, open_directory, own_directories
from dpex.telemetry.discovery import Announcement, identity, started_at, tidy_up
from dpex.telemetry.discovery import targets as announced
from dpex.telemetry.exporter import exporter

ROOT = Path(__file__).parents[2]
NODE = socket.gethostname()
LABELS = {"run_id": "r", "rank": "3", "node": "n"}
TRAINER = """
import sys
from dpex import DpexDataLoader
loader = DpexDataLoader(range(8), batch_size=2, num_workers=1, name="train")
list(loader)
print("trained", flush=True)
sys.stdin.readline()
"""


def trainer(directory: Path, **variables: str) -> subprocess.Popen[str]:
    """A training process that has trained and waits for a line."""
    environment = {**os.environ, "DPEX_METRICS_DIR": str(directory), "DPEX_METRICS_PORT": "0", **variables}
    arguments = [sys.executable, "-c", TRAINER]
    started = subprocess.Popen(arguments, stdin=-1, stdout=-1, stderr=-1, text=True, cwd=ROOT, env=environment)
    assert started.stdout is not None
    assert started.stdout.readline() == "trained\n"
    return started


def targets(directory: Path) -> list[dict[str, Any]]:
    return [group for path in sorted(directory.glob("*.json")) for group in json.loads(path.read_text())]


def test_a_file_as_prometheus_wants_it(tmp_path: Path) -> None:
    directory = tmp_path / "new" / "sd"
    found = Announcement(directory, "127.0.0.1:9", LABELS)
    assert targets(directory) == [{"targets": ["127.0.0.1:9"], "labels": LABELS}]
    assert directory.stat().st_mode & 0o777 == 0o700
    assert os.listdir(directory) == [found.path.name]  # noqa: PTH208  (nothing temporary is left)
    found.withdraw()
    found.withdraw()
    assert targets(directory) == []


def test_two_ranks_with_one_fixed_port_are_both_discovered(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    job = {"TORCHELASTIC_RUN_ID": "job-7", "DPEX_METRICS_PORT": str(port)}
    ranks = [trainer(tmp_path, RANK=str(rank), **job) for rank in range(2)]
    try:
        found = targets(tmp_path)
        assert {(t["labels"]["rank"], t["labels"]["run_id"], t["labels"]["node"]) for t in found} == {
            ("0", "job-7", NODE),
            ("1", "job-7", NODE),
        }
        assert {t["labels"]["rank"] for t in found if t["targets"] == [f"127.0.0.1:{port}"]} == {"0"}
        for target in found:
            with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=60) as answer:
                assert b'dpex_batches_total{loader="train"} 4.0' in answer.read()
    finally:
        said = [rank.communicate("\n", timeout=60)[1] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert targets(tmp_path) == []
    assert f"metrics: port {port} is taken on 127.0.0.1; this process serves" in said[1]
    assert "is taken" not in said[0]


def test_what_a_killed_process_left_goes_when_the_next_one_comes(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    assert len(targets(tmp_path)) == 1
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=60)
    assert len(targets(tmp_path)) == 1
    second = trainer(tmp_path)
    (found,) = tmp_path.glob("*.json")
    assert f"-{second.pid}-" in found.name
    second.communicate("\n", timeout=60)
    assert targets(tmp_path) == []


def test_a_number_that_is_in_use_again_does_not_keep_a_file(tmp_path: Path) -> None:
    mine = started_at(os.getpid())
    assert mine
    stale = tmp_path / f"dpex-{NODE}-{os.getpid()}-{mine - 500}.json"
    living = tmp_path / f"dpex-{NODE}-{os.getpid()}-{mine}.json"
    elsewhere = tmp_path / "dpex-other-node-1-1.json"
    foreign = tmp_path / "somebody-1-1.json"
    for path in (stale, living, elsewhere, foreign):
        path.write_text("[]")
    assert tidy_up(tmp_path, NODE) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted([living, elsewhere, foreign])


def test_a_process_of_unknown_start_keeps_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def denied(_: psutil.Process) -> float:
        raise psutil.AccessDenied

    path = tmp_path / f"dpex-{NODE}-{os.getpid()}-500.json"
    path.write_text("[]")
    monkeypatch.setattr(psutil.Process, "create_time", denied)
    assert started_at(os.getpid()) == 0
    assert tidy_up(tmp_path, NODE) == []
    assert path.exists()


def test_a_zombie_process_counts_as_ended() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    assert process.stdin is not None
    assert (started_at(process.pid) or 0) >= (started_at(os.getpid()) or 0) > 0
    process.stdin.close()
    until(lambda: started_at(process.pid) is None)
    assert process.returncode is None  # nobody has waited for it: it is a zombie
    process.wait()


only_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
SOMEBODY = 12345


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Of a user whose three places exist and are empty."""
    for name in ("run", "tmp", "home"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    return {"XDG_RUNTIME_DIR": str(tmp_path / "run"), "HOME": str(tmp_path / "home")}


def test_the_directories_that_are_meant_without_another(tmp_path: Path, environment: dict[str, str]) -> None:
    usual, temporary = tmp_path / "run" / "dpex", tmp_path / "tmp" / f"dpex-{os.getuid()}"
    assert own_directories(environment) == [usual, temporary, tmp_path / "home/.cache/dpex/metrics"]
    assert own_directories({}) == [temporary]
    assert own_directories({"XDG_RUNTIME_DIR": "/nowhere", "XDG_CACHE_HOME": "/c"}) == [
        temporary,
        Path("/c/dpex/metrics"),
    ]
    assert announcement_directories(environment) == []
    Announcement(temporary, "127.0.0.1:9", LABELS, own=True)
    assert announcement_directories(environment) == [temporary]
    assert announcement_directories({**environment, "DPEX_METRICS_DIR": "/given"}) == [Path("/given")]


@only_root
def test_the_session_of_another_user_is_not_ours(tmp_path: Path, environment: dict[str, str]) -> None:
    os.chown(tmp_path / "run", SOMEBODY, SOMEBODY)  # su without a login
    assert own_directories(environment)[0] == tmp_path / "tmp" / f"dpex-{os.getuid()}"


def test_what_is_the_users_own_is_nobody_elses_to_read(tmp_path: Path) -> None:
    own = Announcement(tmp_path / "own", "127.0.0.1:9", LABELS, own=True)
    given = Announcement(tmp_path / "given", "127.0.0.1:9", LABELS)
    assert (own.path.parent.stat().st_mode & 0o777, own.path.stat().st_mode & 0o777) == (0o700, 0o600)
    assert given.path.stat().st_mode & 0o777 == 0o644  # for a Prometheus that is another user


Prepared = Callable[[Path], None]


def linked(place: Path) -> None:
    place.rmdir()
    place.symlink_to(place.parent)


def linked_by_another(place: Path) -> None:
    linked(place)
    os.chown(place, SOMEBODY, SOMEBODY, follow_symlinks=False)


def given_away(place: Path) -> None:
    os.chown(place, SOMEBODY, SOMEBODY)


@pytest.mark.parametrize(
    ("prepared", "as_own", "as_given"),
    [
        (lambda place: place.chmod(0o777), "others may change the files in {}", "all users may change the files in {}"),
        (lambda place: place.chmod(0o1777), "others may change", ""),
        (linked, "{} is a symbolic link: remove it", ""),  # given, and made by this user
        pytest.param(given_away, "{} is another user's .number 12345.: remove it, or give", "", marks=only_root),
        pytest.param(linked_by_another, "{} is a symbolic link", "{} is a symbolic link of another", marks=only_root),
    ],
    ids=["all may write", "all may write, sticky", "link", "another user's", "another user's link"],
)
def test_directories_that_others_can_change_are_refused(
    tmp_path: Path, prepared: Prepared, as_own: str, as_given: str
) -> None:
    """Root, in a container, may be given a directory of its host's user."""
    place = tmp_path / "place"
    place.mkdir()
    prepared(place)
    for own, why in ((True, as_own), (False, as_given)):
        refused = pytest.raises(PermissionError, match=why.format(place)) if why else nullcontext()
        with refused:
            Announcement(place, "127.0.0.1:9", LABELS, own=own).withdraw()


@only_root
def test_a_directory_of_another_user_except_root_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: SOMEBODY + 1)
    with open_directory(tmp_path, own=False):
        pass
    given_away(tmp_path)
    with pytest.raises(PermissionError, match="another user's"), open_directory(tmp_path, own=False):
        pass


def test_a_taken_directory_is_skipped_for_the_next_with_a_log(
    tmp_path: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("DPEX_METRICS_DIR", "XDG_RUNTIME_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", environment["HOME"])
    taken, used = own_directories(os.environ)
    taken.symlink_to(tmp_path)
    loader = DpexDataLoader([1, 2], metrics_port=0)
    assert list(loader)
    assert len(targets(used)) == 1
    assert (
        f"announced in {used}, because {taken} is a symbolic link: remove it, or give a directory of yours"
        in caplog.text
    )
    assert announcement_directories(os.environ) == [used]
    loader.close()
    assert targets(used) == []


def test_metrics_go_on_without_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tmp_path.chmod(0o777)
    monkeypatch.setenv("DPEX_METRICS_DIR", str(tmp_path))
    loader = DpexDataLoader([1, 2], metrics_port=0)
    assert list(loader)
    with urllib.request.urlopen(f"http://127.0.0.1:{exporter.port}/metrics", timeout=60) as answer:
        assert b"dpex_batches_total" in answer.read()
    assert f"which serves at 127.0.0.1:{exporter.port}: all users may change the files in {tmp_path}" in caplog.text
    loader.close()


def test_foreign_fifos_links_and_folders_are_ignored(tmp_path: Path) -> None:
    good = json.dumps([{"targets": ["127.0.0.1:9"], "labels": LABELS}])
    (tmp_path / "elsewhere").write_text(good)
    os.mkfifo(tmp_path / "dpex-fifo-1-1.json")
    (tmp_path / "dpex-link-1-1.json").symlink_to("elsewhere")
    (tmp_path / "dpex-folder-1-1.json").mkdir()
    (tmp_path / "dpex-long-1-1.json").write_text(good + " " * 70000)
    (tmp_path / "dpex-bytes-1-1.json").write_bytes(b"\xff\xfe")
    (tmp_path / "dpex-deep-1-1.json").write_text("[" * 60000)
    (tmp_path / "dpex-good-1-1.json").write_text(good)
    assert [one.path.name for one in announced(tmp_path)] == ["dpex-good-1-1.json"]


@pytest.mark.parametrize(
    ("environment", "run_id", "rank"),
    [
        ({"DPEX_RUN_ID": "mine", "SLURM_JOB_ID": "5", "RANK": "2"}, "mine", "2"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "5"}, "5", "0"),
        ({"SLURM_JOB_ID": "5", "SLURM_PROCID": "3"}, "5", "3"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "1"}, "a-29500", "1"),
        ({}, f"{NODE}-{os.getpid()}-{started_at(os.getpid())}", "0"),
    ],
    ids=["named", "slurm", "srun", "torchrun", "alone"],
)
def test_who_a_process_says_it_is(environment: dict[str, str], run_id: str, rank: str) -> None:
    assert identity(environment) == {"run_id": run_id, "rank": rank, "node": NODE}
