"""`dpex top`: the reports of processes that answer, that do not, and that are gone."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time
import urllib.request
from collections.abc import Iterator
from io import BytesIO, StringIO, TextIOWrapper
from pathlib import Path
from typing import Any

import pytest
from families import Augmented
from rich.console import Console
from waiting import until

from dpex import DpexDataLoader
from dpex.cli import main, top
from dpex.cli.top import Report, ReportRequests, fetching, report_screen
from dpex.telemetry.discovery import Announcement, started_at, targets
from dpex.telemetry.exporter import exporter

ROOT = Path(__file__).parents[2]


def shown(*found: Report, width: int = 120) -> str:
    out = StringIO()
    Console(file=out, width=width).print(report_screen(found, "/place"))
    return out.getvalue()


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

    def fetch(url: str) -> str:
        asked.append(url.partition("127.0.0.1:")[2])
        return f"report {len(asked)}"

    requests = ReportRequests(fetch)
    assert requests.reports([], [directory]) == []
    first = announce(directory, 1)
    announce(directory, 2, rank="1")
    assert sorted(one.text for one in requests.reports([], [directory])) == ["report 1", "report 2"]
    assert sorted(asked) == [f"{port}/diagnosis.txt?stretch=recent&columns=80" for port in (1, 2)]
    first.unlink()
    assert [one.url[-1] for one in requests.reports([], [directory])] == ["2"]


def test_a_killed_or_silent_process_is_named_so(directory: Path) -> None:
    def fetch(url: str) -> str:
        raise {"1": ConnectionRefusedError(111, "refused"), "2": TimeoutError("timed out"), "3": ValueError("bad")}[
            url.split(":")[2][0]
        ]

    for port in (1, 2, 3):
        announce(directory, port)
    killed = directory / f"dpex-{socket.gethostname()}-{2**22 + 1}-1.json"
    killed.write_text(json.dumps([{"targets": ["127.0.0.1:4"], "labels": {"run_id": "r"}}]))
    assert [one.error for one in ReportRequests(fetch).reports([], [directory])] == [
        "gone: the process was killed",
        "gone",
        "no answer: timed out",
        "no answer: bad",
    ]


def test_ranks_are_asked_at_once_and_a_silent_one_is_a_line(directory: Path) -> None:
    everybody, wakes, asked = threading.Barrier(40), threading.Event(), []

    def fetch(url: str) -> str:
        port = url.split(":")[2].partition("/")[0]
        asked.append(port)
        if not wakes.is_set():
            everybody.wait(60.0)
        if port == "7":
            wakes.wait(60.0)
        return f"report of {port}"

    for port in range(1, 41):
        announce(directory, port, str(port))
    requests = ReportRequests(fetch)
    found: list[Report] = []
    until(lambda: found.extend(requests.reports([], [directory], wait_s=0.5)) or found[-1].text != "")
    first = found[:40] if found[39].text else found[-40:]
    assert [one.url for one in first if one.error] == ["http://127.0.0.1:7"]
    (line,) = [text for text in shown(*first).splitlines() if "127.0.0.1:7 " in text or "127.0.0.1:7:" in text]
    assert line.startswith("http://127.0.0.1:7: no answer for")
    assert asked.count("7") == 1
    wakes.set()
    until(lambda: all(one.text for one in requests.reports([], [directory], wait_s=0.5)))


def test_characters_that_control_a_terminal_are_replaced() -> None:
    text = shown(Report(url="http://h:1", text="one\x1b[2J\ntwo"), Report(url="http://h:2", error="no\x07"))
    assert "\x1b" not in text
    assert "\x07" not in text
    assert "one?[2J" in text
    assert "two" in text


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
        (one,) = ReportRequests(fetching(None)).reports([f"127.0.0.1:{server.getsockname()[1]}"], [])
        thread.join()
    assert one.error.startswith("no endpoint of dpex is there")
    assert "no endpoint of dpex is there" in shown(one)


def test_an_address_that_is_none_is_said_to_be_one() -> None:
    (one,) = ReportRequests(fetching(None)).reports(["127.0.0.1:port"], [])
    assert "nonnumeric port: 'port'" in one.error


def test_a_refusal_is_shown_in_its_own_words(trained: DpexDataLoader[Any]) -> None:
    def elsewhere(url: str) -> Any:
        request = urllib.request.Request(url, headers={"Host": "trainer.example"})
        return urllib.request.urlopen(request, timeout=60)

    (one,) = ReportRequests(elsewhere).reports([f"127.0.0.1:{exporter.port}"], [])
    assert one.error.startswith("no answer: 421 Misdirected Request: this endpoint is not known as 'trainer.example'.")
    assert "DPEX_METRICS_ALLOWED_HOSTS" in one.error


def test_targets_are_in_rank_order_without_invalid_files(directory: Path) -> None:
    for port, rank in ((1, "10"), (2, "9"), (3, "1")):
        announce(directory, port, rank)
    for number, text in enumerate(("nonsense", "{}", '[{"targets": 3, "labels": {}}]', "[1]")):
        (directory / f"dpex-bad-{number}-1.json").write_text(text)
    assert [one.labels["rank"] for one in targets(directory)] == ["1", "9", "10"]
    assert targets(directory / "nowhere") == []
    own = directory / f"dpex-{socket.gethostname()}-{os.getpid()}-{started_at(os.getpid())}.json"
    own.write_text(json.dumps([{"targets": ["h:1"], "labels": {"run_id": "0", "__scheme__": "https"}}]))
    assert (targets(directory)[0].url, targets(directory)[0].gone) == ("https://h:1", False)


@pytest.fixture
def trained(directory: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[DpexDataLoader[Any]]:
    monkeypatch.setenv("DPEX_METRICS_DIR", str(directory))
    with DpexDataLoader(Augmented(40), batch_size=4, num_workers=1, metrics_port=0, name="photos") as loader:
        list(loader)
        yield loader


def test_once(trained: DpexDataLoader[Any], capsys: pytest.CaptureFixture[str]) -> None:
    until(lambda: main.main(["top", "--once"]) == 0 and "photos" in capsys.readouterr().out)
    for address in (f"127.0.0.1:{exporter.port}/", str(exporter.port)):
        until(lambda: main.main(["top", "--once", address]) == 0 and "photos" in capsys.readouterr().out)  # noqa: B023


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
    thread = threading.Thread(target=top.show_reports, args=(options, console, stop))
    thread.start()
    until(lambda: out.getvalue().count("photos") >= 3)
    stop.set()
    thread.join(60.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("leave", ["Ctrl-C", "q"])
def test_a_terminal_is_left_as_it_was(trained: DpexDataLoader[Any], leave: str) -> None:
    """No traceback, the other screen is closed, the cursor is there again, and the terminal has its settings."""
    master, slave = pty.openpty()
    before = termios.tcgetattr(slave)
    process = subprocess.Popen([sys.executable, "-m", "dpex", "top"], stdin=slave, stdout=slave, stderr=slave, cwd=ROOT)
    text = b""
    deadline = time.monotonic() + 60
    while b"photos" not in text and time.monotonic() < deadline:
        text += os.read(master, 65536)
    os.write(master, b"xq") if leave == "q" else process.send_signal(signal.SIGINT)
    reader = threading.Thread(target=lambda: text_after.extend(read_all(master)))
    text_after = bytearray()
    reader.start()
    assert process.wait(60.0) == 0
    assert termios.tcgetattr(slave) == before
    os.close(slave)
    reader.join(60.0)
    os.close(master)
    text += bytes(text_after)
    assert b"q or Ctrl-C ends this." in text
    assert b"Traceback" not in text
    assert text.rindex(b"\x1b[?1049l") > text.rindex(b"\x1b[?1049h")
    assert text.rindex(b"\x1b[?25h") > text.rindex(b"\x1b[?25l")


def read_all(descriptor: int) -> bytes:
    text = b""
    try:
        while part := os.read(descriptor, 65536):
            text += part
    except OSError:  # the other end is closed
        pass
    return text


def test_a_pipe_that_is_closed(trained: DpexDataLoader[Any]) -> None:
    command = f"{sys.executable} -m dpex top | head -n 1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True, cwd=ROOT, timeout=60)
    assert (done.stderr, len(done.stdout.splitlines())) == ("", 1)
