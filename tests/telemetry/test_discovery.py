"""Processes are found by their files, and nobody is found who is no more."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from families import until

from dpex.telemetry.discovery import Announcement, default_directory, identity, started_at, tidy_up

ROOT = Path(__file__).parents[2]
NODE = socket.gethostname()
LABELS = {"run_id": "r", "rank": "3", "node": "n"}
TRAINER = """
import sys
from dpex import DpexDataLoader
loader = DpexDataLoader(range(8), batch_size=2, num_workers=1, metrics_port=0, name="train")
list(loader)
print("trained", flush=True)
sys.stdin.readline()
"""


def trainer(directory: Path, **variables: str) -> subprocess.Popen[str]:
    """A training process that has trained and waits for a line."""
    environment = {**os.environ, "DPEX_METRICS_DIR": str(directory), **variables}
    arguments = [sys.executable, "-c", TRAINER]
    started = subprocess.Popen(arguments, stdin=-1, stdout=-1, text=True, cwd=ROOT, env=environment)
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


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
def test_promtool_accepts_it(tmp_path: Path) -> None:
    Announcement(tmp_path, "[::1]:9", {**LABELS, "__scheme__": "https"})
    config = tmp_path / "prometheus.yml"
    config.write_text(f"scrape_configs:\n- job_name: dpex\n  file_sd_configs:\n  - files: ['{tmp_path}/dpex-*.json']\n")
    done = subprocess.run(
        ["promtool", "check", "config", str(config)], capture_output=True, text=True, timeout=30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_two_ranks_are_found_by_their_labels_and_leave(tmp_path: Path) -> None:
    job = {"TORCHELASTIC_RUN_ID": "job-7"}
    ranks = [trainer(tmp_path, RANK=str(rank), **job) for rank in range(2)]
    try:
        found = targets(tmp_path)
        assert {(t["labels"]["rank"], t["labels"]["run_id"], t["labels"]["node"]) for t in found} == {
            ("0", "job-7", NODE),
            ("1", "job-7", NODE),
        }
        for target in found:
            with urllib.request.urlopen(f"http://{target['targets'][0]}/metrics", timeout=10) as answer:
                assert b'dpex_batches_total{loader="train"} 4.0' in answer.read()
    finally:
        for rank in ranks:
            rank.communicate("\n", timeout=30)
    assert [rank.returncode for rank in ranks] == [0, 0]
    assert targets(tmp_path) == []


def test_what_a_killed_process_left_goes_when_the_next_one_comes(tmp_path: Path) -> None:
    first = trainer(tmp_path)
    assert len(targets(tmp_path)) == 1
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=30)
    assert len(targets(tmp_path)) == 1
    second = trainer(tmp_path)
    (found,) = tmp_path.glob("*.json")
    assert f"-{second.pid}-" in found.name
    second.communicate("\n", timeout=30)
    assert targets(tmp_path) == []


def test_a_number_that_is_in_use_again_does_not_keep_a_file(tmp_path: Path) -> None:
    mine = started_at(os.getpid())
    assert mine
    stale = tmp_path / f"dpex-{NODE}-{os.getpid()}-{mine - 1}.json"
    living = tmp_path / f"dpex-{NODE}-{os.getpid()}-{mine}.json"
    elsewhere = tmp_path / "dpex-other-node-1-1.json"
    foreign = tmp_path / "somebody-1-1.json"
    for path in (stale, living, elsewhere, foreign):
        path.write_text("[]")
    assert tidy_up(tmp_path, NODE) == [stale]
    assert sorted(tmp_path.iterdir()) == sorted([living, elsewhere, foreign])


def test_when_a_process_started() -> None:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1)
    assert (started_at(process.pid) or 0) >= (started_at(os.getpid()) or 0) > 0
    process.communicate(b"\n")
    until(lambda: started_at(process.pid) is None)


def test_the_directory_that_is_meant_without_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert default_directory({"XDG_RUNTIME_DIR": "/run/user/7"}) == Path("/run/user/7/dpex")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert default_directory({}) == tmp_path / f"dpex-{os.getuid()}"


def test_a_directory_everybody_may_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(PermissionError, match="everybody may change"):
        Announcement(tmp_path, "127.0.0.1:9", LABELS)
    tmp_path.chmod(0o1777)
    Announcement(tmp_path, "127.0.0.1:9", LABELS).withdraw()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a directory away")
def test_a_default_directory_of_another_user_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 12345, 12345)
    with pytest.raises(PermissionError, match="another user's"):
        Announcement(tmp_path, "127.0.0.1:9", LABELS, own=True)
    Announcement(tmp_path, "127.0.0.1:9", LABELS).withdraw()


@pytest.mark.parametrize(
    ("environment", "run_id", "rank"),
    [
        ({"DPEX_RUN_ID": "mine", "SLURM_JOB_ID": "5", "RANK": "2"}, "mine", "2"),
        ({"TORCHELASTIC_RUN_ID": "none", "SLURM_JOB_ID": "5"}, "5", "0"),
        ({"TORCHELASTIC_RUN_ID": "none", "MASTER_ADDR": "a", "MASTER_PORT": "29500", "RANK": "1"}, "a-29500", "1"),
        ({}, f"{NODE}-{os.getpid()}-{started_at(os.getpid())}", "0"),
    ],
)
def test_who_a_process_says_it_is(environment: dict[str, str], run_id: str, rank: str) -> None:
    assert identity(environment) == {"run_id": run_id, "rank": rank, "node": NODE}
