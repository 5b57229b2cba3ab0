"""The endpoint's HTTP: what is served where, and that nobody holds it up."""

import contextlib
import http.client
import importlib
import json
import socket
import ssl
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from certificates import make_certificate
from families import no_descriptor_left
from waiting import until

from dpex.diagnose.diagnosis import DiagnosisSource
from dpex.diagnose.facts import Subject
from dpex.engine.snapshots import LoaderCounters
from dpex.telemetry.http import server as serving
from dpex.telemetry.http.history import HistorySampler
from dpex.telemetry.http.server import Answer, Request, Server
from dpex.telemetry.http.site import PAGE, Site, asset
from dpex.telemetry.loader_metrics import LoaderMetrics

HOSTILE = '"><img src=x onerror=alert(1)>'


def metrics(environ: dict[str, str], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{environ['HTTP_ACCEPT']} {environ['HTTP_ACCEPT_ENCODING']} {environ['QUERY_STRING']}".encode()]


@pytest.fixture
def server() -> Iterator[Server]:
    ledgers = [LoaderMetrics(HOSTILE)]
    ledgers[0].case = DiagnosisSource(book=LoaderCounters(), subject=Subject(dataset=HOSTILE))
    sampler = HistorySampler(lambda: ledgers, {"node": HOSTILE})
    sampler.turn()
    found = Server("127.0.0.1", 0, Site(metrics, sampler))
    found.start()
    yield found
    found.stop()
    assert not found.thread.is_alive()


def ask(server: Server, path: str, method: str = "GET", **headers: str) -> http.client.HTTPResponse:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
    return connection.getresponse()


def raw(server: Server, data: bytes) -> bytes:
    """All that comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(data)
        found = b""
        while part := client.recv(65536):
            found += part
        return found


@pytest.mark.parametrize("path", PAGE)
def test_the_page_comes_from_the_package(server: Server, path: str) -> None:
    answer = ask(server, path)
    assert (answer.status, answer.read()) == (200, asset(PAGE[path]))


def test_the_page_asks_nobody_else() -> None:
    """The licence and the library's comment may name their home; what is loaded may not."""
    for name in PAGE.values():
        if name != "uPlot.LICENSE.txt":
            text = asset(name).decode().replace("http://www.w3.org/2000/svg", "")
            text = text.replace("https://github.com/leeoniya/uPlot", "")
            assert "http://" not in text
            assert "https://" not in text
    assert "innerHTML" not in asset("page.js").decode() + asset("charts.js").decode()


@pytest.mark.parametrize("path", ["/", "/api/state", "/diagnosis.json", "/diagnosis.txt", "/static/page.js", "/no"])
def test_headers_that_keep_others_out(server: Server, path: str) -> None:
    headers = ask(server, path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers


def test_diagnoses_by_loader_and_stretch(server: Server) -> None:
    (whole,) = json.loads(ask(server, "/diagnosis.json").read())["loaders"]
    assert (whole["name"], whole["stretch"], whole["level"]) == (HOSTILE, "run", "early")
    query = urlencode({"loader": HOSTILE, "stretch": "recent"})
    (recent,) = json.loads(ask(server, f"/diagnosis.json?{query}").read())["loaders"]
    assert (recent["stretch"], recent["is_whole"]) == ("recent", True)
    assert ask(server, "/diagnosis.json?stretch=x").status == 400
    assert ask(server, "/diagnosis.json?loader=x").status == 404


def test_the_report_in_text(server: Server) -> None:
    answer = ask(server, "/diagnosis.txt?stretch=recent")
    text = answer.read().decode()
    assert answer.headers["Content-Type"] == "text/plain; charset=utf-8"
    assert "dpex diagnosis of" in text
    assert "Now: " in text
    assert ask(server, "/diagnosis.txt?stretch=x").status == 400
    assert ask(server, "/diagnosis.txt?loader=x").status == 404
    narrow = ask(server, "/diagnosis.txt?columns=50").read().decode().partition("\n\n")[2].partition("Now: ")[0]
    assert max(map(len, narrow.splitlines())) <= 50 < max(map(len, text.splitlines()))
    assert ask(server, "/diagnosis.txt?columns=x").status == 400


def test_a_loader_that_has_begun_since_the_last_frame() -> None:
    ledger = LoaderMetrics("train")
    sampler = HistorySampler(lambda: [ledger], {"node": "n"})
    assert "No loader has been iterated yet." in sampler.text([], is_whole=True)
    sampler.turn()
    assert "train: no batch has been delivered yet." in sampler.text(
        sampler.diagnoses(None, "recent") or [], is_whole=True
    )
    ledger.case = DiagnosisSource(book=LoaderCounters(), subject=Subject(dataset="Numbers"))
    assert "dpex diagnosis of train (Numbers" in sampler.text(sampler.diagnoses(None, "recent") or [], is_whole=True)


def test_head_is_get_without_a_body(server: Server) -> None:
    for path in ("/", "/metrics", "/api/state", "/diagnosis.json"):
        head, get = ask(server, path, "HEAD"), ask(server, path)
        length = int(get.headers["Content-Length"])
        assert (head.status, head.read()) == (200, b"")
        assert abs(int(head.headers["Content-Length"]) - length) <= 16  # figures move on between the two
        assert len(get.read()) == length


@pytest.mark.parametrize("path", ["/nowhere", "/static/../web.py", "/static/", "/static/index.html", "/api"])
def test_other_paths_are_not_found(server: Server, path: str) -> None:
    assert ask(server, path).status == 404


def test_state(server: Server) -> None:
    answer = ask(server, "/api/state")
    state = json.loads(answer.read())
    assert (answer.headers["Content-Type"], answer.headers["Cache-Control"]) == ("application/json", "no-store")
    assert (state["loaders"][0]["name"], state["process"]["node"]) == (HOSTILE, HOSTILE)
    assert len(state["loaders"][0]["frames"]) == 1
    assert json.loads(ask(server, "/api/state?since=1").read())["loaders"][0]["frames"] == []


@pytest.mark.parametrize("since", ["x", "-1", "1.5", "9" * 16, ""])
def test_a_bad_since_is_said_to_be_bad(server: Server, since: str) -> None:
    answer = ask(server, f"/api/state?since={since}")
    expected = 200 if not since else 400  # an empty value is no value
    assert answer.status == expected


@pytest.mark.parametrize("accept", ["application/openmetrics-text; version=abc", "text/plain; version=1.x"])
def test_a_version_that_is_no_number_is_a_bad_request(accept: str) -> None:
    registry = importlib.import_module("prometheus_client").CollectorRegistry()
    app = importlib.import_module("prometheus_client").make_wsgi_app(registry)
    site = Site(app, HistorySampler(list, {}))
    assert site(Request("/metrics", "", {"Accept": accept})).status == 400


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", b"404"),
        (b"GET /" + b"x" * 70000 + b" HTTP/1.1\r\n\r\n", b"414"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 0\r\n\r\n", b"501"),
    ],
)
def test_each_request_is_answered_and_the_connection_closed(server: Server, data: bytes, status: bytes) -> None:
    assert status in raw(server, data)


def test_who_sends_no_request_and_who_reads_no_answer_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving._Handler, "timeout", 0.05)
    server = Server("127.0.0.1", 0, lambda request: Answer(HTTPStatus.OK, [], bytes(50_000_000)))
    server.start()
    with contextlib.ExitStack() as clients:
        for data in (b"", b"GET /metrics HT", b"GET / HTTP/1.1\r\n\r\n"):
            client = clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
            client.sendall(data)
        until(lambda: not server._open)
    server.stop()


def is_dropped(client: socket.socket) -> bool:
    """Whether what still comes ends."""
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_300_silent_slow_or_unread_connections_block_no_request(server: Server) -> None:
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as crowd:
        for number in range(300):
            client = crowd.enter_context(socket.create_connection(address, timeout=60))
            with contextlib.suppress(OSError):  # one of the crowd may have been dropped already
                client.sendall((b"", b"G", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n\r\n" * 20)[number % 4])
            if number % 50 == 49:
                assert ask(server, "/metrics").status == 200
        assert len(server._open) <= serving.MOST_CONNECTIONS
    until(lambda: not server._open)


def test_stopping_ends_connections_that_are_open(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET")
        until(lambda: server._open)
        server.stop()
        assert not server.thread.is_alive()
        assert not server._open
        assert is_dropped(client)


def test_without_free_descriptors_clients_wait(server: Server) -> None:
    clients = [socket.socket() for _ in range(10)]
    with no_descriptor_left():
        for client in clients:
            client.settimeout(60)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    for client in clients:
        assert client.recv(15) == b"HTTP/1.0 200 OK"
        client.close()


def test_an_error_in_the_application_is_an_answer(caplog: pytest.LogCaptureFixture) -> None:
    def broken(request: Request) -> Answer:
        raise RuntimeError("planted")

    server = Server("127.0.0.1", 0, broken)
    server.start()
    assert ask(server, "/x").status == 500
    assert ask(server, "/x").status == 500
    assert "planted" in caplog.text
    server.stop()
    server.stop()


def test_a_silent_client_does_not_hold_up_tls(tmp_path: Path) -> None:
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    make_certificate(key, cert)
    body = b"x" * 3_000_000
    server = Server(
        "127.0.0.1", 0, lambda request: Answer(HTTPStatus.OK, [], body), serving.tls(str(cert), str(key), None)
    )
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as silent:
        silent.sendall(b"\x16")
        context = ssl.create_default_context(cafile=str(cert))
        context.check_hostname = False
        connection = http.client.HTTPSConnection("127.0.0.1", server.port, timeout=60, context=context)
        for _ in range(2):
            connection.request("GET", "/")
            assert connection.getresponse().read() == body
        connection.close()
    server.stop()
