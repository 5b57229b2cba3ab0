"""``dpex top``: what the live page shows, in a terminal, for one process or for all that are announced.

It only asks the endpoints, once a second, and every few seconds for diagnoses, each with a limit of its own; processes
come and go meanwhile.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import ssl
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from dpex.cli import common
from dpex.measure.readable import duration, fine_percent
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
NOTHING = "-"
NOBODY = (
    "No training process is announced in {place}. Start one with DPEX_METRICS_PORT=0 in its environment, or with "
    "DpexDataLoader(..., metrics_port=0), or give its address: dpex top http://127.0.0.1:PORT"
)

_DESCRIPTION = """
Show what the live page shows, in a terminal and fresh every second: for each training process with metrics, whether it
waits for data, why, and what the tuner decided.
"""
NO_ANSWER = (OSError, ValueError, LookupError, TypeError)
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
        """Keep this answer. Another process may have begun to serve at the same address."""
        if self.state is not None and self.state["process"] != state["process"]:
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
        self.watched: dict[str, WatchedProcess] = {}
        self._turns = 0

    def turn(self) -> None:
        """Ask all processes for their state. One that was seen once and has gone stays, as gone."""
        found = [ScrapeTarget(url=url, labels={}, path=Path()) for url in self._urls] or targets(*self._directories)
        for target in found:
            one = self.watched.setdefault(target.url, WatchedProcess(target.url))
            one.labels = target.labels
            if target.gone:
                one.error = "gone: the process was killed"
        announced = {target.url for target in found if not target.gone}
        for one in self.watched.values():
            if one.url not in announced and not one.error:
                one.error = "gone"
        to_ask = [one for one in self.watched.values() if one.url in announced]
        if to_ask:
            with ThreadPoolExecutor(min(AT_ONCE, len(to_ask))) as pool:
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
    if not watched:
        return Text(NOBODY.format(place=place))
    return Group(*(panel(one) for one in watched))


def panel(one: WatchedProcess) -> Panel:
    """Return the panel of a process."""
    process = one.state["process"] if one.state is not None else one.labels
    words = [f"{word} {process[name]}" for word, name in _WHO if process.get(name)]
    title = Text(_plain(" · ".join([*words, one.url])))
    parts: list[RenderableType] = []
    if one.error:
        parts.append(Text(_plain(one.error), style="red"))
    parts += [_loader(one, loader) for loader in (one.state["loaders"] if one.state is not None else ())]
    if not parts:
        parts.append(Text("No loader has been iterated yet.", style="dim"))
    style = "red" if one.error else "none"
    return Panel(Group(*parts), title=title, title_align="left", border_style=style)


_WHO = (("run", "run_id"), ("rank", "rank"), ("machine", "node"))


def _loader(one: WatchedProcess, loader: State) -> RenderableType:
    now, found = loader["now"], one.diagnoses.get(loader["name"])
    style = STYLES.get(found["level"], "none") if found is not None else "dim"
    heading = Text.assemble((_plain(loader["name"]), "bold"), "  ", (_plain(_said(loader, found)), style))
    rows = []
    if found is not None and found["level"] != "early":
        told = (("first", found["shown"]["first"]), ("to end it", found["shown"].get("end", "")))
        rows += [(name, Text(_plain(text))) for name, text in told if text]
    rows += [("wait", Text(_percent(now["wait_ratio"]), style))]
    if now["gpu_stall_ratio"] is not None:
        rows.append(("GPU stall", Text(f"{_percent(now['gpu_stall_ratio'])} of the time")))
    rows += [
        ("speed", Text(_speed(loader))),
        ("workers", Text(_workers(one, loader))),
        ("queue", Text(_queue(one, loader))),
        ("a batch", Text(_stages(now["stages_s"]))),
    ]
    rows += [
        (_clock(decision["at"]), Text(_plain(_decided(decision)))) for decision in loader["decisions"][-DECISIONS:]
    ]
    table = Table.grid(padding=(0, 2))
    for name, value in rows:
        table.add_row(Text(name, "dim"), value)
    return Group(heading, table)


def _said(loader: State, found: State | None) -> str:
    if loader["state"] == "empty":
        return "No batch has been delivered yet."
    shown = found["shown"] if found is not None else {"sentence": "Not diagnosed yet.", "confidence": ""}
    sure = f" ({shown['confidence']})" if found is not None and found["level"] != "early" else ""
    idle = " No batches are asked for right now." if loader["state"] == "idle" else ""
    return f"{shown['sentence']}{sure}{idle}"


def _speed(loader: State) -> str:
    now = loader["now"]
    if now["batches_per_second"] is None:
        return NOTHING
    rates = f"{now['batches_per_second']:.1f} batches/s, {now['samples_per_second']:,.0f} samples/s"
    return f"{rates}; {loader['batches']:,} batches so far"


def _workers(one: WatchedProcess, loader: State) -> str:
    parts = []
    for pool in WORKER_POOLS:
        running, wanted = (one.latest(loader, f"{pool}_{level}") for level in ("running", "wanted"))
        if running or wanted:
            parts.append(f"{running} {pool}" + (f" ({wanted} wanted)" if wanted != running else ""))
    return ", ".join(parts) or "none; the training process makes the batches"


def _queue(one: WatchedProcess, loader: State) -> str:
    made = one.latest(loader, "local_in_flight") + one.latest(loader, "remote_in_flight")
    return f"{one.latest(loader, 'ready')} ready, {made} in flight, prefetch {one.latest(loader, 'prefetch')}"


def _stages(stages_s: Mapping[str, float | None]) -> str:
    words = {"read": "load", "encode": "encode"}
    parts = [f"{words.get(stage, stage)} {duration(seconds)}" for stage, seconds in stages_s.items() if seconds]
    return ", ".join(parts) or NOTHING


def _decided(decision: State) -> str:
    outcome = decision["outcome"]
    brought = "not judged yet"
    if outcome is not None:
        kept = "kept" if outcome["kept"] else "undone"
        brought = f"measured {_percent(outcome['wait_ratio'])}: {kept}"
    predicted = _percent(decision["predicted"]["wait_ratio"])
    return f"{decision['text']} ({decision['reason']}). Wait: expected {predicted}, {brought}"


def _percent(ratio: float | None) -> str:
    return NOTHING if ratio is None else fine_percent(ratio)


def _clock(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def _plain(text: str) -> str:
    """Return the text without characters that control a terminal."""
    return "".join(letter if letter.isprintable() else "?" for letter in text)


# -- the command -------------------------------------------------------------------------------------------------------


def register(subparsers: Any) -> None:
    """Add this command."""
    summary = "watch the training processes: whether each one waits for data, and why"
    found = common.add(subparsers, "top", summary=summary, description=_DESCRIPTION)
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
    common.follow(look, console, stop)
    return 0
