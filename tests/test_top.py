"""`dpex top`: what is shown of processes that answer, that do not, and that are gone."""

from __future__ import annotations

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from decisions import a_decision
from families import Augmented
from rich.console import Console
from waiting import until

from dpex import DpexDataLoader
from dpex.autotune.types import Outcome, Settings
from dpex.cli import main, top
from dpex.cli.top import ProcessWatch, WatchedProcess, screen
from dpex.telemetry.discovery import Announcement, started_at, targets
from dpex.telemetry.exporter import exporter
from dpex.telemetry.http.frames import COLUMNS
from dpex.telemetry.http.history import encoded

ROOT = Path(__file__).parents[1]
DECISION = a_decision(
    old=Settings(local=2, prefetch=4),
    new=Settings(local=5, prefetch=10),
    text="40 % of the time is lost",
    predicted_wait=0.02,
    outcome=Outcome(rate=9.0, wait=0.04, kept=True, at=2.0),
)
SUMMARY: dict[str, Any] = {
    "wait_ratio": 0.38,
    "gpu_stall_ratio": None,
    "batches_per_second": 12.5,
    "samples_per_second": 200.0,
}


DIAGNOSED: dict[str, Any] = {
    "name": "train",
    "level": "bad",
    "shown": {
        "sentence": "It waits.",
        "confidence": "confidence 0.90 of 1",
        "first": "8 workers instead of 4.",
        "end": "9 do.",
    },
}


def frame(number: int, **changes: float) -> list[Any]:
    empty = dict.fromkeys(COLUMNS, 0) | {"number": number, "seconds": 1.0, "work_s": 0.5, "wait_s": 0.5}
    return list((empty | {"local_running": 2, "local_wanted": 5, "ready": 3, "prefetch": 10} | changes).values())


def state(number: int = 1, pid: str = "1", **changes: Any) -> dict[str, Any]:
    loader = {
        "name": "train",
        "state": "running",
        "in_process": False,
        "batches": 1234,
        "now": SUMMARY,
        "decisions": [encoded(1, 0.0, DECISION)],
        "frames": [frame(number)],
    }
    process = {"run_id": "run-1", "rank": "0", "node": "here", "pid": pid}
    return {"process": process, "number": number, "columns": COLUMNS, "loaders": [loader | changes]}


def shown(*watched: WatchedProcess, width: int = 160) -> str:
    out = StringIO()
    Console(file=out, width=width).print(screen(watched, "/place"))
    return out.getvalue()


def watched(**changes: Any) -> WatchedProcess:
    found = WatchedProcess("http://127.0.0.1:1")
    found.take(state(**changes))
    found.diagnoses = {"train": DIAGNOSED}
    return found


# -- the screen --------------------------------------------------------------------------------------------------------


def test_all_there_is_to_see() -> None:
    undone = encoded(1, 0.0, replace(DECISION, outcome=Outcome(rate=1.0, wait=0.5, kept=False, at=2.0)))
    waiting = encoded(2, 0.0, replace(DECISION, outcome=None))
    text = shown(watched(decisions=[undone, waiting, encoded(3, 0.0, DECISION)]), width=200)
    for part in (
        "run run-1 · rank 0 · machine here · http://127.0.0.1:1",
        "train  It waits. (confidence 0.90 of 1)",
        "first      8 workers instead of 4.",
        "to end it  9 do.",
        "wait       38 %",
        "12.5 batches/s, 200 samples/s; 1,234 batches so far",
        "2 local (5 wanted)",
        "3 ready, 0 in flight, prefetch 10",
        "40 % of the time is lost (too few). Wait: expected 2.0 %, measured 50 %: undone",
        "Wait: expected 2.0 %, not judged yet",
        "Wait: expected 2.0 %, measured 4.0 %: kept",
    ):
        assert part in text
    assert "GPU" not in text
    assert "GPU stall  7.0 %" in shown(watched(now=SUMMARY | {"gpu_stall_ratio": 0.07}))


def test_before_the_first_batch_and_between_passes() -> None:
    nothing = SUMMARY | {"wait_ratio": None, "batches_per_second": None, "samples_per_second": None}
    assert "train  No batch has been delivered yet." in shown(watched(state="empty", now=nothing))
    assert "It waits. (confidence 0.90 of 1) No batches are asked for right now." in shown(watched(state="idle"))
    assert "Not diagnosed yet." in shown(watched(name="other"))
    none = [frame(1, local_running=0, local_wanted=0)]
    assert "workers    no worker runs now" in shown(watched(frames=none))
    assert "workers    the training process makes the batches" in shown(watched(frames=none, in_process=True))
    assert "No loader has been iterated yet." in shown(WatchedProcess("http://x"))


# -- whom it asks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "sd"


def announce(directory: Path, port: int, rank: str = "0") -> Path:
    announcement = Announcement(directory, f"127.0.0.1:{port}", {"run_id": "r", "rank": rank, "node": "n"})
    path = announcement.path.with_name(f"dpex-elsewhere-{port}-1.json")
    announcement.path.rename(path)
    return path


def test_processes_come_and_go(directory: Path) -> None:
    asked: list[str] = []

    def ask(url: str) -> dict[str, Any]:
        if "diagnosis" in url:
            return {"loaders": [DIAGNOSED]}
        asked.append(url)
        return state(7)

    watch = ProcessWatch([], [directory], ask)
    watch.turn()
    assert watch.watched == {}
    first = announce(directory, 1)
    watch.turn()
    announce(directory, 2, rank="1")
    watch.turn()
    assert [url.partition("1:")[2] for url in sorted(asked)] == [
        *("1/api/state?since=0", "1/api/state?since=6", "2/api/state?since=0")
    ]
    first.unlink()
    watch.turn()
    assert [one.url[-1] for one in watch.watched.values()] == ["2"]


def test_diagnoses_are_asked_for_seldom_and_may_be_missing() -> None:
    asked: list[str] = []

    def ask(url: str) -> dict[str, Any]:
        asked.append(url.rpartition("/")[2].partition("?")[0])
        if "diagnosis" in url and len(asked) < 8:
            raise OSError("planted")
        return {"loaders": [DIAGNOSED]} if "diagnosis" in url else state(len(asked))

    watch = ProcessWatch(["http://127.0.0.1:1"], [], ask)
    for _ in range(15):
        watch.turn()
    assert asked.count("state") == 15
    assert asked.count("diagnosis.json") == 4 + 2
    (one,) = watch.watched.values()
    assert (one.error, one.diagnoses) == ("", {"train": DIAGNOSED})
    one.take(state(1, pid="2"))
    assert one.diagnoses == {}


def test_who_was_killed_is_gone_and_who_does_not_answer_is_said_to(directory: Path) -> None:
    def ask(url: str) -> dict[str, Any]:
        raise {"1": ConnectionRefusedError(111, "refused"), "2": TimeoutError("timed out"), "3": KeyError("number")}[
            url.split(":")[2][0]
        ]

    for port in (1, 2, 3):
        announce(directory, port)
    killed = directory / f"dpex-{socket.gethostname()}-{2**22 + 1}-1.json"
    killed.write_text(json.dumps([{"targets": ["127.0.0.1:4"], "labels": {"run_id": "r"}}]))
    watch = ProcessWatch([], [directory], ask)
    watch.turn()
    assert [one.error for one in watch.watched.values()] == [
        *(
            "gone: the process was killed",
            "gone",
            "no answer: timed out",
            "no live page of dpex is there (KeyError('number'))",
        )
    ]


@pytest.mark.parametrize("answer", [b"SSH-2.0-OpenSSH\r\n\r\n", b"HTTP/1.0 200 OK\r\n\r\n{}"])
def test_a_server_of_another_kind_is_said_to_be_one(answer: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(1 << 16)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        watch = ProcessWatch([f"127.0.0.1:{server.getsockname()[1]}"], [], top.asking(None))
        watch.turn()
        thread.join()
    (one,) = watch.watched.values()
    assert one.error.startswith("no live page of dpex is there")
    assert "no live page of dpex is there" in shown(one)


def test_an_address_that_is_none_is_said_to_be_one() -> None:
    watch = ProcessWatch(["127.0.0.1:port"], [], top.asking(None))
    watch.turn()
    (one,) = watch.watched.values()
    assert "nonnumeric port: 'port'" in one.error


def test_a_refusal_is_shown_in_its_own_words(trained: DpexDataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def elsewhere(url: str) -> Any:
        request = urllib.request.Request(url, headers={"Host": "trainer.example"})
        return urllib.request.urlopen(request, timeout=60)

    watch = ProcessWatch([f"127.0.0.1:{exporter.port}"], [], elsewhere)
    watch.turn()
    (one,) = watch.watched.values()
    assert one.error.startswith("no answer: 421 Misdirected Request: this endpoint is not known as 'trainer.example'.")
    assert "DPEX_METRICS_ALLOWED_HOSTS" in one.error


def test_targets_are_in_the_order_of_ranks_and_what_is_none_is_left_out(directory: Path) -> None:
    for port, rank in ((1, "10"), (2, "9"), (3, "1")):
        announce(directory, port, rank)
    for number, text in enumerate(("nonsense", "{}", '[{"targets": 3, "labels": {}}]', "[1]")):
        (directory / f"dpex-bad-{number}-1.json").write_text(text)
    assert [one.labels["rank"] for one in targets(directory)] == ["1", "9", "10"]
    assert targets(directory / "nowhere") == []
    own = directory / f"dpex-{socket.gethostname()}-{os.getpid()}-{started_at(os.getpid())}.json"
    own.write_text(json.dumps([{"targets": ["h:1"], "labels": {"run_id": "0", "__scheme__": "https"}}]))
    assert (targets(directory)[0].url, targets(directory)[0].gone) == ("https://h:1", False)


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def trained(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DpexDataLoader[Any]]:
    monkeypatch.setenv("DPEX_METRICS_DIR", str(directory))
    with DpexDataLoader(Augmented(40), batch_size=4, num_workers=1, metrics_port=0, name="photos") as loader:
        list(loader)
        yield loader


def test_once(trained: DpexDataLoader[Any], capsys: pytest.CaptureFixture[str]) -> None:
    until(lambda: main.main(["top", "--once"]) == 0 and "photos" in capsys.readouterr().out)
    assert main.main(["top", "--once", f"127.0.0.1:{exporter.port}/"]) == 0
    assert "photos" in capsys.readouterr().out


def test_an_output_that_knows_ascii_only(trained: DpexDataLoader[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii", write_through=True))
    until(lambda: main.main(["top", "--once"]) == 0 and b"photos" in written.getvalue())
    assert "\ufffd" not in written.getvalue().decode("ascii")


def test_once_without_anybody(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main.main(["top", "--once", "--dir", str(tmp_path)]) == 1
    assert "DPEX_METRICS_PORT=0" in " ".join(capsys.readouterr().out.split())
    assert main.main(["top", "--once", "127.0.0.1:1"]) == 1
    assert "gone" in capsys.readouterr().out
    assert main.main(["top", "--cafile", "/nowhere.pem"]) == 2
    assert "--cafile='/nowhere.pem'" in capsys.readouterr().err


@pytest.mark.parametrize("terminal", [False, True])
def test_it_follows_until_it_is_to_stop(
    trained: DpexDataLoader[Any], monkeypatch: pytest.MonkeyPatch, terminal: bool
) -> None:
    monkeypatch.setattr("dpex.cli.main.EVERY_S", 0.01)
    out, stop = StringIO(), threading.Event()
    options = main.parser().parse_args(["top"])
    console = Console(file=out, width=100, height=40, force_terminal=terminal)
    thread = threading.Thread(target=top.run, args=(options, console, stop))
    thread.start()
    until(lambda: out.getvalue().count("photos") >= 3)
    stop.set()
    thread.join(60.0)
    assert not thread.is_alive()


def test_ctrl_c_in_a_terminal(trained: DpexDataLoader[Any]) -> None:
    """No traceback, and the terminal is left as it was: the other screen is closed, the cursor is there again."""
    master, slave = pty.openpty()
    process = subprocess.Popen([sys.executable, "-m", "dpex", "top"], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT)
    os.close(slave)
    text = b""
    deadline = time.monotonic() + 30
    while b"photos" not in text and time.monotonic() < deadline:
        text += os.read(master, 65536)
    process.send_signal(signal.SIGINT)
    try:
        while part := os.read(master, 65536):
            text += part
    except OSError:  # the other end is closed
        pass
    os.close(master)
    assert process.wait(60.0) == 0
    assert b"Traceback" not in text
    assert text.rindex(b"\x1b[?1049l") > text.rindex(b"\x1b[?1049h")
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")


def test_a_pipe_that_is_closed(trained: DpexDataLoader[Any]) -> None:
    command = f"{sys.executable} -m dpex top | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stderr, len(done.stdout.splitlines())) == ("", 1)
