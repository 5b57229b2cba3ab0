"""``dpex top``: what the live page shows, in a terminal, for one process or for all that are announced.

It only asks the endpoints, once a second, and every few seconds for diagnoses, each with a limit of its own; processes
come and go meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dpex.cli.main import add_command, follow
from dpex.measure.readable import fine_percent
from dpex.schedule.names import WORKER_POOLS
from dpex.system.directories import own_directories, to_look_in
from dpex.system.user_warnings import forgive
from dpex.telemetry.discovery import ScrapeTarget, targets

DIAGNOSED_EVERY = 5
"""A diagnosis is asked for at every fifth turn, as it changes slowly and costs the training process time."""
PATIENCE_S = 2.0
"""A process that does not answer in time is shown as silent, and the others are not kept waiting."""
DECISIONS = 4
"""The latest decisions of each loader that are shown."""
AT_ONCE = 16
"""Processes that are asked at the same time."""
MOST_SAID = 1000
"""Bytes of a refusal that are shown."""
STYLES = {"early": "dim", "good": "green", "fair": "yellow", "bad": "red"}
NOBODY = (
    "No training process is announced in {place}. Start one with DPEX_METRICS_PORT=0 in its environment, or with "
    "DpexDataLoader(..., metrics_port=0), or give its address: dpex top http://127.0.0.1:PORT"
)
_DESCRIPTION = """
Show what the live page shows, in a terminal and fresh every second: for each training process with metrics, whether it
waits for data, why, and what the tuner decided.
"""
NO_ANSWER = (OSError, ValueError, LookupError, TypeError, http.client.HTTPException)
_WHO = (("run", "run_id"), ("rank", "rank"), ("machine", "node"))
State = Mapping[str, Any]
Ask = Callable[[str], State]


@dataclass
class WatchedProcess:
    """A process: its last answer, the diagnoses of its loaders by name, and why it does not answer, if so."""

    url: str
    labels: Mapping[str, str] = field(default_factory=dict)
    state: State | None = None
    diagnoses: dict[str, State] = field(default_factory=dict)
    error: str = ""

    @property
    def since(self) -> int:
        """The frame before the latest one that is known: an answer then has at least one."""
        return max(0, int(self.state["number"]) - 1) if self.state is not None else 0

    def take(self, state: State) -> None:
        """Keep this answer. Another process may have begun to serve at the same address.

        Raises:
            LookupError: It is no answer of a live page.
        """
        process, _ = state["process"], state["loaders"]
        if self.state is not None and self.state["process"] != process:
            self.diagnoses = {}
        self.state, self.error = state, ""

    def latest(self, loader: State, column: str) -> int:
        """Return that column of the loader's latest frame; 0 before the first frame."""
        assert self.state is not None
        return int(loader["frames"][-1][self.state["columns"].index(column)]) if loader["frames"] else 0


class ProcessWatch:
    """All processes: those of the addresses given, or those announced in ``directories``."""

    def __init__(self, urls: Sequence[str], directories: Sequence[Path], ask: Ask) -> None:
        self._urls = [url.rstrip("/") if "://" in url else f"http://{url.rstrip('/')}" for url in urls]
        self._directories = directories
        self._ask = ask
        self._turns = 0
        self.watched: dict[str, WatchedProcess] = {}

    def turn(self) -> None:
        """Ask all processes for their state. One that is not announced any more is left out."""
        found = [ScrapeTarget(url=url, labels={}, path=Path()) for url in self._urls] or targets(*self._directories)
        known, self.watched = self.watched, {}
        for target in found:
            one = self.watched[target.url] = known.get(target.url, WatchedProcess(target.url))
            one.labels, one.error = target.labels, "gone: the process was killed" if target.gone else ""
        to_ask = [one for one in self.watched.values() if not one.error]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(self._ask_one, to_ask))
        self._turns += 1

    def _ask_one(self, one: WatchedProcess) -> None:
        try:
            one.take(self._ask(f"{one.url}/api/state?since={one.since}"))
        except NO_ANSWER as error:
            one.error = _why_not(error)
            return
        if self._turns % DIAGNOSED_EVERY == 0 or not one.diagnoses:
            with contextlib.suppress(*NO_ANSWER):  # a process that has gone is shown as gone a second later
                found = self._ask(f"{one.url}/diagnosis.json?stretch=recent")
                one.diagnoses = {diagnosed["name"]: diagnosed for diagnosed in found["loaders"]}


def _why_not(error: Exception) -> str:
    """Return the reason in words; a refusal says which name the endpoint has to be asked by."""
    if isinstance(error, urllib.error.HTTPError):
        with contextlib.suppress(OSError, ValueError):
            return f"no answer: {error.read(MOST_SAID).decode(errors='replace').strip() or error.reason}"
    if isinstance(error, LookupError | http.client.HTTPException):
        return f"no live page of dpex is there ({error!r})"
    reason = getattr(error, "reason", error)
    return "gone" if isinstance(reason, ConnectionError) else f"no answer: {reason}"


def asking(context: ssl.SSLContext | None) -> Ask:
    """Return a function that asks an endpoint."""

    def ask(url: str) -> State:
        with urllib.request.urlopen(url, timeout=PATIENCE_S, context=context) as answer:
            return dict(json.loads(answer.read()))

    return ask


# -- what is shown -----------------------------------------------------------------------------------------------------


def screen(watched: Sequence[WatchedProcess], place: str) -> RenderableType:
    """Return the panels of all processes; ``place`` is where they are announced."""
    return Group(*map(_panel, watched)) if watched else Text(NOBODY.format(place=place))


def _panel(one: WatchedProcess) -> Panel:
    process = one.labels if one.state is None else one.state["process"]
    words = [f"{word} {process[name]}" for word, name in _WHO if process.get(name)]
    parts: list[RenderableType] = [Text(_plain(one.error), style="red")] if one.error else []
    parts += [_loader(one, loader) for loader in (one.state["loaders"] if one.state is not None else ())]
    return Panel(
        Group(*parts or [Text("No loader has been iterated yet.", style="dim")]),
        title=Text(_plain(" · ".join([*words, one.url]))),
        title_align="left",
        border_style="red" if one.error else "none",
    )


def _loader(one: WatchedProcess, loader: State) -> RenderableType:
    found = one.diagnoses.get(loader["name"])
    style = "dim" if found is None else STYLES.get(found["level"], "none")
    table = Table.grid(padding=(0, 2))
    for name, text in _rows(one, loader, found):
        table.add_row(Text(name, "dim"), Text(_plain(text), style if name == "wait" else ""))
    heading = Text.assemble((_plain(loader["name"]), "bold"), "  ", (_plain(_verdict(loader, found)), style))
    return Group(heading, table)


def _verdict(loader: State, found: State | None) -> str:
    if loader["state"] == "empty":
        return "No batch has been delivered yet."
    text = "Not diagnosed yet." if found is None else found["shown"]["sentence"]
    sure = "" if found is None or found["level"] == "early" else f" ({found['shown']['confidence']})"
    return f"{text}{sure}{' No batches are asked for right now.' if loader['state'] == 'idle' else ''}"


def _rows(one: WatchedProcess, loader: State, found: State | None) -> Iterator[tuple[str, str]]:
    """The name and the text of each line about a loader."""
    now = loader["now"]
    if found is not None and found["level"] != "early":
        yield "first", found["shown"]["first"]
        if found["shown"].get("end"):
            yield "to end it", found["shown"]["end"]
    yield "wait", _percent(now["wait_ratio"])
    if now["gpu_stall_ratio"] is not None:
        yield "GPU stall", f"{_percent(now['gpu_stall_ratio'])} of the time"
    if now["batches_per_second"] is not None:
        rates = f"{now['batches_per_second']:.1f} batches/s, {now['samples_per_second']:,.0f} samples/s"
        yield "speed", f"{rates}; {loader['batches']:,} batches so far"
    none = "the training process makes the batches" if loader["in_process"] else "no worker runs now"
    yield "workers", ", ".join(_workers(one, loader)) or none
    made = sum(one.latest(loader, f"{pool}_in_flight") for pool in WORKER_POOLS)
    ready, most = one.latest(loader, "ready"), one.latest(loader, "prefetch")
    yield "queue", f"{ready} ready, {made} in flight, prefetch {most}"
    if loader.get("cache") is not None:
        yield "cache", _cached(loader["cache"], now["cache_hit_ratio"])
    for decision in loader["decisions"][-DECISIONS:]:
        yield time.strftime("%H:%M:%S", time.localtime(decision["at"])), _decided(decision)


def _workers(one: WatchedProcess, loader: State) -> Iterator[str]:
    for pool in WORKER_POOLS:
        running, wanted = (one.latest(loader, f"{pool}_{level}") for level in ("running", "wanted"))
        if running or wanted:
            yield f"{running} {pool}" + (f" ({wanted} wanted)" if wanted != running else "")


def _cached(cache: State, ratio: float | None) -> str:
    sizes = ((cache["memory_bytes"], "in memory"), (cache["disk_bytes"], "on disk"))
    words = ", ".join(f"{size / 1e6:,.0f} MB {where}" for size, where in sizes if size is not None)
    return f"{_percent(ratio)} of the samples came from it; {words}; {cache['saved_s']:,.0f} s of workers' time saved"


def _decided(decision: State) -> str:
    outcome, brought = decision["outcome"], "not judged yet"
    if outcome is not None:
        brought = f"measured {_percent(outcome['wait_ratio'])}: {'kept' if outcome['kept'] else 'undone'}"
    predicted = _percent(decision["predicted"]["wait_ratio"])
    return f"{decision['text']} ({decision['reason']}). Wait: expected {predicted}, {brought}"


def _percent(ratio: float | None) -> str:
    return "-" if ratio is None else fine_percent(ratio)


def _plain(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# -- the command -------------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    """Add this command."""
    summary = "watch the training processes: whether each one waits for data, and why"
    found = add_command(subparsers, "top", summary=summary, description=_DESCRIPTION)
    found.add_argument(
        "url", nargs="*", help="address of a live page (default: all training processes that are announced)"
    )
    found.add_argument(
        "--dir", help="directory where processes are announced (default: $DPEX_METRICS_DIR, else this user's)"
    )
    found.add_argument(
        "--once", action="store_true", help="print it once and exit; the status is 1 if no process answered"
    )
    found.add_argument("--cafile", help="PEM file of the certificate authority of live pages that are served over TLS")
    found.set_defaults(command=run)


def run(options: argparse.Namespace, console: Console | None = None, stop: threading.Event | None = None) -> int:
    """Until ``stop`` or Ctrl-C; returns the exit status."""
    try:
        context = ssl.create_default_context(cafile=options.cafile) if options.cafile else None
    except OSError as error:
        print(f"dpex top: --cafile={options.cafile!r}: {error}", file=sys.stderr)
        return 2
    directories = [Path(options.dir)] if options.dir else to_look_in(os.environ)
    place = str((directories or own_directories(os.environ))[0])
    watch = ProcessWatch(options.url, directories, asking(context))
    forgive(sys.stdout)
    console = console or Console()

    def look() -> RenderableType:
        watch.turn()
        return screen(list(watch.watched.values()), place)

    if options.once:
        console.print(look())
        return 0 if any(not one.error for one in watch.watched.values()) else 1
    follow(look, console, stop)
    return 0
