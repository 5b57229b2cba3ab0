"""``dpex top``: the report of each training process that serves metrics, fetched and printed again and again.

Processes come and go meanwhile. All are asked at the same time, each by a thread. A process that has not answered in
time is shown as a line until it answers, and delays no other.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import os
import ssl
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.text import Text

from dpex.cli.main import COLUMNS, add_command, redraw
from dpex.system.clock import monotonic
from dpex.system.directories import announcement_directories, own_directories
from dpex.system.user_warnings import replace_unencodable
from dpex.telemetry.discovery import ScrapeTarget, targets

TIMEOUT_S = 30.0
"""Maximum seconds of a request. Many are needed if many ranks, which share the CPUs of a machine, answer at once."""
FIRST_S, LATER_S = 10.0, 2.0
"""Maximum seconds to wait for the answers before the first screen, and before each later screen."""
BORDER = 4
"""Columns that the frame around a report takes. Reports are wrapped at the width inside the frame."""
MOST_SHOWN = 1000
"""Maximum bytes of an error response that are shown."""
NO_PROCESS = (
    "No training process is announced in {place}. Start one with DPEX_METRICS_PORT=0 in its environment, or with "
    "DpexDataLoader(..., metrics_port=0), or give its address: dpex top http://127.0.0.1:PORT"
)
_DESCRIPTION = """
Print the report of each training process that serves metrics, again every second: whether it waits for data, why, what
to do first, and the tuner's decisions. q or Ctrl-C ends it.
"""
_NO_ANSWER = (OSError, ValueError, http.client.HTTPException)
Fetch = Callable[[str], str]
"""Returns the text at an address."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """The answer of one process: its report, or the reason why it did not answer."""

    url: str
    text: str = ""
    error: str = ""


class NotDpexError(ValueError):
    """The answer is not a report."""


class ReportRequest:
    """A request to one process, in a daemon thread: `report` is its answer once ``is_done`` is set."""

    def __init__(self, target: ScrapeTarget, fetch: Fetch, columns: int, answered: threading.Event) -> None:
        self.target = target
        self.is_done: threading.Event = threading.Event()
        self._began = monotonic()
        self._report = Report(url=target.url)
        work = (fetch, columns, answered)
        threading.Thread(target=self._run, args=work, name="dpex-ask", daemon=True).start()

    @property
    def report(self) -> Report:
        if self.is_done.is_set():
            return self._report
        return Report(url=self.target.url, error=f"no answer for {monotonic() - self._began:.0f} s")

    def _run(self, fetch: Fetch, columns: int, answered: threading.Event) -> None:
        self._report = _report(self.target, fetch, columns)
        self.is_done.set()
        answered.set()


class ReportRequests:
    """Asks processes for their reports, with at most one open request per process."""

    def __init__(self, fetch: Fetch) -> None:
        self._fetch = fetch
        self._open: dict[str, ReportRequest] = {}
        self._answered = threading.Event()

    def reports(
        self, urls: Sequence[str], directories: Sequence[Path], columns: int = COLUMNS, wait_s: float = FIRST_S
    ) -> list[Report]:
        """Return the report of each process at ``urls`` or, without ``urls``, of those announced in ``directories``.

        Lines have at most ``columns`` characters. If a process has not answered after ``wait_s`` seconds, its report
        says so.
        """
        given = [_with_scheme(url.rstrip("/")) for url in urls]
        found = [ScrapeTarget(url=url, labels={}, path=Path()) for url in given] or targets(*directories)
        before, deadline = self._open, monotonic() + wait_s
        asked = [before.get(one.url) or ReportRequest(one, self._fetch, columns, self._answered) for one in found]
        while not all(one.is_done.is_set() for one in asked) and (left_s := deadline - monotonic()) > 0:
            self._answered.wait(left_s)
            self._answered.clear()
        told = [(one, one.is_done.is_set(), one.report) for one in asked]
        self._open = {one.target.url: one for one, is_done, _ in told if not is_done}
        return [report for _, _, report in told]


def _with_scheme(address: str) -> str:
    """Return the URL of an address. A number is a port of this machine."""
    if address.isdecimal():
        return f"http://127.0.0.1:{address}"
    return address if "://" in address else f"http://{address}"


def _report(target: ScrapeTarget, fetch: Fetch, columns: int) -> Report:
    if target.gone:
        return Report(url=target.url, error="gone: the process was killed")
    try:
        return Report(url=target.url, text=fetch(f"{target.url}/diagnosis.txt?stretch=recent&columns={columns}"))
    except _NO_ANSWER as error:
        return Report(url=target.url, error=_reason(error))


def _reason(error: Exception) -> str:
    """Return the reason as text. For an HTTP error, it is the text of the response."""
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(OSError, ValueError):
            return f"no answer: {error.read(MOST_SHOWN).decode(errors='replace').strip() or error.reason}"
    if isinstance(error, NotDpexError | http.client.HTTPException):
        return f"no endpoint of dpex is there ({error})"
    reason = getattr(error, "reason", error)
    return "gone" if isinstance(reason, ConnectionError) else f"no answer: {reason}"


def fetching(context: ssl.SSLContext | None) -> Fetch:

    def fetch(url: str) -> str:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S, context=context) as answer:
            kind = answer.headers.get("Content-Type", "")
            if not kind.startswith("text/plain"):
                raise NotDpexError(f"its answer has the type {kind!r}")
            return str(answer.read().decode(errors="replace"))

    return fetch


def report_screen(found: Sequence[Report], place: str) -> RenderableType:
    """Return a panel for each process, and a line for one without a report; ``place`` is the directory in which
    processes are announced."""
    return Group(*map(_report_panel, found)) if found else Text(NO_PROCESS.format(place=place))


def _report_panel(one: Report) -> RenderableType:
    if one.error:
        return Text(_printable(f"{one.url}: {one.error}"), style="red")
    return Panel(Text(_printable(one.text.rstrip())), title=Text(_printable(one.url)), title_align="left")


def _printable(text: str) -> str:
    """Return the text without characters that control a terminal; lines stay."""
    return "".join(letter if letter.isprintable() or letter == "\n" else "?" for letter in text)


# -- the command -------------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    summary = "watch the training processes: whether each one waits for data, and why"
    found = add_command(subparsers, "top", summary=summary, description=_DESCRIPTION)
    found.add_argument(
        "url",
        nargs="*",
        help="address of a live page, or its port on this machine (default: all training processes that are announced)",
    )
    found.add_argument(
        "--dir", help="directory where processes are announced (default: $DPEX_METRICS_DIR, else this user's)"
    )
    found.add_argument(
        "--once", action="store_true", help="print it once and exit; the status is 1 if no process answered"
    )
    found.add_argument("--cafile", help="PEM file of the certificate authority of live pages that are served over TLS")
    found.set_defaults(command=show_reports)


def show_reports(
    options: argparse.Namespace, console: Console | None = None, stop: threading.Event | None = None
) -> int:
    """Print until ``stop`` is set, or q or Ctrl-C is pressed. Return the exit status."""
    try:
        context = ssl.create_default_context(cafile=options.cafile) if options.cafile else None
    except OSError as error:
        print(f"dpex top: --cafile={options.cafile!r}: {error}", file=sys.stderr)
        return 2
    directories = [Path(options.dir)] if options.dir else announcement_directories(os.environ)
    place = str((directories or own_directories(os.environ))[0])
    fetch = fetching(context)
    replace_unencodable(sys.stdout)
    shown = console or Console()

    requests, is_first = ReportRequests(fetch), True

    def asked() -> list[Report]:
        nonlocal is_first
        wait_s, is_first = FIRST_S if is_first else LATER_S, False
        return requests.reports(options.url, directories, shown.width - BORDER, wait_s)

    if options.once:
        found = asked()
        shown.print(report_screen(found, place))
        return 0 if any(not one.error for one in found) else 1
    redraw(lambda: report_screen(asked(), place), shown, stop)
    return 0
