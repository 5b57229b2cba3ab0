"""The endpoint's HTTP: what is served where, that nobody holds it up, and that a storm renders metrics seldom."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import random
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from families import no_descriptor_left
from waiting import until

from dpex.diagnose.gathered import Context
from dpex.diagnose.source import DiagnosisSource
from dpex.engine.loader_counters import LoaderCounters
from dpex.telemetry.http import server as serving
from dpex.telemetry.http import site
from dpex.telemetry.http.diagnoses import Diagnoses
from dpex.telemetry.http.history import HistorySampler
from dpex.telemetry.http.server import Answer, Request, Server, parsed
from dpex.telemetry.http.site import PAGE, CachedAnswer, Site, asset
from dpex.telemetry.loader_metrics import LoaderMetrics

HOSTILE = '"><img src=x onerror=alert(1)>'


def metrics(environ: dict[str, str], start_response: Any) -> list[bytes]:
    start_response("200 OK", [("Content-Type", "text/plain")])
    return [f"{environ['HTTP_ACCEPT']} {environ['HTTP_ACCEPT_ENCODING']} {environ['QUERY_STRING']}".encode()]


@pytest.fixture
def server() -> Iterator[Server]:
    ledgers = [LoaderMetrics(HOSTILE)]
    ledgers[0].case = DiagnosisSource(book=LoaderCounters(), context=Context(dataset=HOSTILE))
    diagnoses = Diagnoses(lambda: ledgers)
    sampler = HistorySampler(lambda: ledgers, {"node": HOSTILE}, diagnoses.mark)
    sampler.turn()
    found = Server("127.0.0.1", 0, Site(metrics, sampler, diagnoses))
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


# -- what is served ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", PAGE)
def test_the_page_comes_from_the_package_and_is_asked_for_again(server: Server, path: str) -> None:
    answer = ask(server, path)
    body = answer.read()
    assert (answer.status, body) == (200, asset(PAGE[path]).body)
    assert answer.headers["Cache-Control"] == "no-cache"
    again = ask(server, path, If_None_Match=answer.headers["ETag"])
    assert (again.status, again.read()) == (304, b"")


def test_the_page_asks_nobody_else() -> None:
    """The licence and the library's comment may name their home; what is loaded may not."""
    for name in PAGE.values():
        if name != "uPlot.LICENSE.txt":
            text = asset(name).body.decode().replace("http://www.w3.org/2000/svg", "")
            text = text.replace("https://github.com/leeoniya/uPlot", "")
            assert "http://" not in text
            assert "https://" not in text
    assert "innerHTML" not in asset("page.js").body.decode() + asset("charts.js").body.decode()


@pytest.mark.parametrize("path", ["/", "/api/state", "/diagnosis.json", "/static/page.js", "/nowhere"])
def test_headers_that_keep_others_out(server: Server, path: str) -> None:
    headers = ask(server, path).headers
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; script-src 'self';")
    assert "unsafe" not in headers["Content-Security-Policy"]
    assert "Access-Control-Allow-Origin" not in headers


def test_the_report_has_no_scripts_and_what_users_name_is_text_in_it(server: Server) -> None:
    answer = ask(server, "/diagnosis")
    text = answer.read().decode()
    assert answer.headers["Content-Security-Policy"].startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert (HOSTILE in text, html.escape(HOSTILE) in text) == (False, True)
    assert "A conclusion needs" in text


def test_diagnoses_by_loader_and_stretch(server: Server) -> None:
    (whole,) = json.loads(ask(server, "/diagnosis.json").read())["loaders"]
    assert (whole["name"], whole["stretch"], whole["level"]) == (HOSTILE, "run", "early")
    query = urlencode({"loader": HOSTILE, "stretch": "recent"})
    (recent,) = json.loads(ask(server, f"/diagnosis.json?{query}").read())["loaders"]
    assert (recent["stretch"], recent["is_whole"]) == ("recent", True)
    assert ask(server, "/diagnosis?stretch=x").status == 400
    assert ask(server, "/diagnosis.json?loader=x").status == 404


def test_head_is_get_without_a_body(server: Server) -> None:
    for path in ("/", "/metrics", "/api/state", "/diagnosis"):
        head, get = ask(server, path, "HEAD"), ask(server, path)
        length = get.headers["Content-Length"]
        assert (head.status, head.headers["Content-Length"], head.read()) == (200, length, b"")
        assert len(get.read()) == int(length)


@pytest.mark.parametrize("path", ["/nowhere", "/static/../web.py", "/static/", "/static/index.html", "//", "/api"])
def test_other_paths_are_not_found(server: Server, path: str) -> None:
    assert ask(server, path).status == 404


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_other_methods_are_not_allowed(server: Server, method: str) -> None:
    answer = ask(server, "/metrics", method)
    assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD, OPTIONS")
    assert ask(server, "/metrics", "OPTIONS").status == 200


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


# -- storms ------------------------------------------------------------------------------------------------------------


class Counting:
    """A WSGI application that knows how often it was asked; waits for ``gate`` if there is one."""

    def __init__(self, gate: threading.Event | None = None) -> None:
        self.gate = gate
        self.asked = 0

    def __call__(self, environ: dict[str, str], start_response: Any) -> list[bytes]:
        self.asked += 1
        if self.gate is not None:
            assert self.gate.wait(60.0)
        start_response("200 OK", [])
        return [str(self.asked).encode()]


def metrics_request(accept: str = "", query: str = "") -> Request:
    return Request("GET", "/metrics", query, {"accept": accept})


@pytest.fixture
def kept_as_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "MOST_KEPT_S", 2.0)


@pytest.mark.usefixtures("kept_as_usual")
@pytest.mark.parametrize(
    ("cost_s", "renderings", "oldest_s"), [(0.0, 20, 0.25), (0.001, 20, 0.25), (0.005, 5, 1.0), (1.0, 3, 2.0)]
)
def test_a_storm_is_rendered_seldom_the_more_so_the_dearer_it_is(
    cost_s: float, renderings: int, oldest_s: float
) -> None:
    now, rendered_at, app = [0.0], [0.0], Counting()
    kept = CachedAnswer(app, clock=lambda: now[0], cpu=lambda: app.asked * cost_s)
    ages = []
    for number in range(500):
        now[0] = number * 0.01
        if int(kept.answer(metrics_request()).body) == len(rendered_at):
            rendered_at.append(now[0])
        ages.append(now[0] - rendered_at[-1])
    assert app.asked == renderings
    assert oldest_s - 0.02 < max(ages) < oldest_s


@pytest.mark.usefixtures("kept_as_usual")
def test_who_scrapes_seldom_sees_what_is_new() -> None:
    now, app = [0.0], Counting()
    kept = CachedAnswer(app, clock=lambda: now[0], cpu=lambda: 9.0 * app.asked)
    for number in range(5):
        now[0] = number * 2.0
        assert kept.answer(metrics_request()).body == str(number + 1).encode()


@pytest.mark.usefixtures("kept_as_usual")
def test_formats_and_selections_are_kept_apart_and_not_without_end() -> None:
    kept = CachedAnswer(Counting(), clock=lambda: 0.0)
    accepts, queries = ("", "application/openmetrics-text"), ("name[]=a", "name[]=b")
    answers = {kept.answer(metrics_request(accept, query)).body for accept in accepts for query in queries}
    assert len(answers) == 4
    for number in range(100):
        kept.answer(metrics_request(query=f"name[]={number}"))
    assert len(kept._copies) <= site.MOST_COPIES


@pytest.mark.usefixtures("kept_as_usual")
def test_who_words_it_otherwise_gets_the_same_rendering() -> None:
    app = Counting()
    kept = CachedAnswer(app, clock=lambda: 0.0)
    for number in range(20):
        kept.answer(metrics_request(f"text/plain; a={number}, */*", f"name[]=b&x={number}&name[]=a"))
    kept.answer(metrics_request("", "name[]=a&name[]=b&name[]=a"))
    assert app.asked == 1


@pytest.mark.usefixtures("kept_as_usual")
def test_all_who_come_meanwhile_share_one_rendering() -> None:
    gate = threading.Event()
    app = Counting(gate)
    kept, bodies = CachedAnswer(app, clock=lambda: 0.0), []
    threads = [threading.Thread(target=lambda: bodies.append(kept.answer(metrics_request()).body)) for _ in range(8)]
    for thread in threads:
        thread.start()
    until(lambda: app.asked == 1)
    gate.set()
    for thread in threads:
        thread.join(60.0)
    assert (app.asked, bodies) == (1, [b"1"] * 8)


# -- the server itself -------------------------------------------------------------------------------------------------


def test_a_connection_is_kept_and_requests_may_come_at_once_or_in_pieces(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        for piece in (b"GET /met", b"rics HTTP/1.1\r\nAccept", b": application/openmetrics-text\r\n\r\n"):
            client.sendall(piece)
        file = client.makefile("rb")
        assert file.readline() == b"HTTP/1.1 200 OK\r\n"
        while file.readline() != b"\r\n":
            pass
        assert file.read(30) == b"application/openmetrics-text  "
        client.sendall(b"GET /x HTTP/1.1\r\n\r\nGET /metrics?name[]=b HTTP/1.1\r\nConnection: close\r\n\r\n")
        rest = file.read()
        assert rest.startswith(b"HTTP/1.1 404 Not Found\r\n")
        assert rest.endswith(b"text/plain  name%5B%5D=b")


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"nonsense\r\n\r\n", b"400"),
        (b"\x16\x03\x01\x02\x00\r\n\r\n", b"400"),
        (b"GET /metrics HTTP/1.1\r\nno colon\r\n\r\n", b"400"),
        (b"GET http://elsewhere/ HTTP/1.1\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost: localhost\r\nhost: b\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", b"400"),
        (b"GET / HTTP/1.1\r\nA: b\r\n c\r\n\r\n", b"400"),
        (b"GET /" + b"x" * serving.LONGEST_HEAD, b"431"),
        (b"GET /metrics HTTP/1.0\r\n\r\n", b"200"),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc", b"405"),
    ],
)
def test_what_is_no_request_is_refused_and_the_connection_closed(server: Server, data: bytes, status: bytes) -> None:
    assert raw(server, data).split(b" ")[1] == status


def test_who_says_nothing_holds_up_nobody(server: Server) -> None:
    silent = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(20)]
    silent[0].sendall(b"GET /metrics HT")
    assert ask(server, "/metrics").status == 200
    for client in silent:
        client.close()


def the_connection(server: Server) -> serving._Connection:
    """The only one, as the server sees it."""
    until(lambda: len(server._connections) == 1)
    return next(iter(server._connections))


def test_who_is_silent_for_long_is_dropped(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET")
        the_connection(server).late_at = 0.0
        raw(server, b"GET /metrics HTTP/1.0\r\n\r\n")  # wakes the loop
        assert client.recv(1) == b""


def test_a_request_that_drips_in_has_one_deadline(server: Server) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET /")
        one = the_connection(server)
        until(lambda: one.rank[0])
        late_at = one.late_at
        for letter in b"metrics":
            before = len(one.received)
            client.sendall(bytes([letter]))
            until(lambda before=before: len(one.received) > before)  # type: ignore[misc]
            assert one.late_at == late_at


def test_who_does_not_read_an_answer_is_dropped_however_slowly_it_reads() -> None:
    server = Server("127.0.0.1", 0, lambda request: Answer("200 OK", [], bytes(20_000_000)))
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.1\r\n\r\n")
        one = the_connection(server)
        until(lambda: one.waits_for == serving.WRITE)
        late_at, left = one.late_at, len(one.to_send)
        until(lambda: client.recv(1 << 16) and len(one.to_send) < left)
        assert one.late_at == late_at
        one.late_at = 0.0
        raw(server, b"nonsense\r\n\r\n")  # wakes the loop
        until(lambda: not server._connections)
    server.stop()


def test_of_too_many_connections_the_oldest_idle_one_goes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "MOST_CONNECTIONS", 3)
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as clients:
        asking, idle, other = (clients.enter_context(socket.create_connection(address, timeout=60)) for _ in range(3))
        for number, client in enumerate((asking, idle, other), 1):
            client.sendall(b"GET /nowhere HTTP/1.1\r\n\r\n")
            assert client.recv(4) == b"HTTP"
            until(lambda number=number: len(server._connections) == number)  # type: ignore[misc]
        asking.sendall(b"GET /met")
        until(lambda: any(one.received for one in server._connections))
        assert ask(server, "/metrics").status == 200
        assert is_dropped(idle)
        for client, rest in ((asking, b"rics HTTP/1.1\r\n\r\n"), (other, b"GET /metrics HTTP/1.1\r\n\r\n")):
            client.recv(4096)  # of the answer before
            client.sendall(rest)
            assert client.recv(15) == b"HTTP/1.1 200 OK"


def is_dropped(client: socket.socket) -> bool:
    """Whether what still comes ends."""
    try:
        while client.recv(4096):
            pass
    except ConnectionResetError:
        pass
    return True


def test_a_crowd_of_silent_slow_and_unread_connections_shuts_nobody_out(server: Server) -> None:
    address = ("127.0.0.1", server.port)
    with contextlib.ExitStack() as crowd:
        for number in range(300):
            client = crowd.enter_context(socket.create_connection(address, timeout=60))
            client.sendall((b"", b"G", b"GET / HTTP/1.1\r\nX: ", b"GET / HTTP/1.1\r\n\r\n" * 20)[number % 4])
            if number % 50 == 49:
                assert ask(server, "/metrics").status == 200
        assert len(server._connections) <= serving.MOST_CONNECTIONS
    until(lambda: not server._connections)


def test_who_sends_requests_without_end_takes_turns_with_others() -> None:
    asked: list[str] = []
    both_here = threading.Event()

    def app(request: Request) -> Answer:
        asked.append(request.path)
        assert both_here.wait(60.0)
        return Answer("200 OK", [], b"")

    server = Server("127.0.0.1", 0, app)
    server.start()
    address = ("127.0.0.1", server.port)
    with (
        socket.create_connection(address, timeout=60) as greedy,
        socket.create_connection(address, timeout=60) as other,
    ):
        greedy.sendall(b"GET /greedy HTTP/1.1\r\n\r\n" * 100)
        until(lambda: asked)
        other.sendall(b"GET /other HTTP/1.1\r\n\r\n")
        both_here.set()
        assert other.recv(15) == b"HTTP/1.1 200 OK"
        until(lambda: len(asked) == 101)
    assert asked.index("/other") < 50
    server.stop()


def test_noise_does_no_harm(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    chance = random.Random(1)
    base = b"GET /metrics?name[]=a HTTP/1.1\r\nHost: localhost\r\nAccept: text/plain;version=0.0.4;q=0.5\r\n\r\n"
    for _ in range(300):
        data = bytearray(base * chance.choice((1, 1, 3)) if chance.random() < 0.8 else chance.randbytes(3000))
        for _ in range(chance.randrange(6)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
            client.sendall(data[: chance.randrange(len(data) + 1)] if chance.random() < 0.3 else data)
            if chance.random() < 0.5:
                client.shutdown(socket.SHUT_WR)
                assert b" 500 " not in client.recv(65536)[:20]
    assert ask(server, "/metrics").status == 200
    assert caplog.text == ""


def test_the_server_outlives_a_want_of_descriptors(server: Server) -> None:
    clients = [socket.socket() for _ in range(10)]
    with no_descriptor_left():
        for client in clients:
            client.settimeout(60)
            client.connect(("127.0.0.1", server.port))
            client.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert all(is_dropped(client) for client in clients)
    assert ask(server, "/metrics").status == 200
    for client in clients:
        client.close()


def test_an_answer_that_does_not_fit_into_the_socket_arrives_whole() -> None:
    body = bytes(range(256)) * 40000
    server = Server("127.0.0.1", 0, lambda request: Answer("200 OK", [], body))
    server.start()
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as client:
        client.sendall(b"GET / HTTP/1.0\r\n\r\n")
        until(lambda: any(one.waits_for == serving.WRITE for one in server._connections))
        found = b""
        while part := client.recv(1 << 20):
            found += part
    assert found.endswith(body)
    server.stop()


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
    if shutil.which("openssl") is None:
        pytest.skip("openssl makes the certificate and is not installed")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True, timeout=60)
    body = b"x" * 3_000_000
    server = Server("127.0.0.1", 0, lambda request: Answer("200 OK", [], body), serving.tls(str(cert), str(key), None))
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


def test_parsing() -> None:
    head = b"GET /a?b=c HTTP/1.1\r\nX-One:  two "
    assert parsed(head) == (("GET", "/a", "b=c", {"x-one": "two"}), True)
    for ends in (b"GET / HTTP/1.1\r\nConnection: Close", b"GET / HTTP/1.0", b"POST / HTTP/1.1\r\nContent-Length: 5"):
        found = parsed(ends)
        assert found is not None
        assert not found[1]
