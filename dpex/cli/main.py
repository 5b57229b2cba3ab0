"""The command ``dpex``, and the parser, the table and the screen that its subcommands share.

Each subcommand is a module with ``register(subparsers)``, which names the function to be called.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import select
import sys
import termios
import textwrap
import threading
import tty
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from dpex.cli.about import About
from dpex.version import VERSION

COMMANDS = ("demo", "run", "top", "cluster")
"""Modules of this package, in the order of the help. None imports torch before the script of ``dpex run`` can do so."""
_REPLAY = "see loader.decisions instead; in dpex's repository, python -m benchmarks.simulation.replay reads a trace"
COLUMNS = 80
"""Width of the help, because many terminals are no wider."""
EVERY_S = 1.0
"""Seconds between two drawings of a screen, whose figures are measured once a second."""


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="dpex",
        description="PyTorch's DataLoader with workers that are tuned, here or on a Ray cluster, and that explain why "
        "training waits.",
        allow_abbrev=False,
    )
    found.add_argument("--version", action="version", version=f"dpex {VERSION}")
    found.add_argument(
        "--about", action=About, help="show the versions, CPUs and settings that a report of a problem needs, and exit"
    )
    subparsers = found.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"dpex.cli.{name}").register(subparsers)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line, by default that of the process. Return the exit status; wrong arguments exit with 2."""
    if (sys.argv[1:] if arguments is None else arguments)[:1] == ["replay"]:
        print("dpex replay: " + _REPLAY, file=sys.stderr)
        return 2
    commands = parser()
    options, unknown = commands.parse_known_args(arguments)
    if unknown:
        remedy = "; arguments of the script come after SCRIPT" if hasattr(options, "script") else ""
        commands.error(f"unrecognized arguments: {' '.join(unknown)}{remedy}")
    try:
        return int(options.command(options))
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        if hasattr(options, "script"):  # it may be an error of the script
            raise
        sys.stderr.close()
        return 141


def add_command(
    subparsers: Any, name: str, *, summary: str, description: str, epilog: str = ""
) -> argparse.ArgumentParser:
    """Add a subcommand whose help begins with a description and ends with ``epilog``, such as examples.

    Args:
        subparsers: The subparsers of the command ``dpex``.
        name: The subcommand.
        summary: Its line in the help of ``dpex`` itself.
        description: One paragraph; it is wrapped.
        epilog: Lines that are shown as they are.
    """
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description.strip(), COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def table(headings: Sequence[str], rows: Iterable[Sequence[object]]) -> Table:
    """Return a table with names in its first column and numbers in all other columns."""
    found = Table(box=None, pad_edge=False)
    for number, heading in enumerate(headings):
        found.add_column(heading, justify="right" if number else "left")
    for row in rows:
        found.add_row(*(escape(str(value)) for value in row))
    return found


def redraw(draw: Callable[[], RenderableType], console: Console, stop: threading.Event | None) -> None:
    """Draw every `EVERY_S` until ``stop`` is set, or q or Ctrl-C is pressed. Without a terminal, append drawings."""
    stop = stop or threading.Event()
    if not console.is_terminal:
        with contextlib.suppress(KeyboardInterrupt):
            console.print(draw())
            while not stop.wait(EVERY_S):
                console.print(draw())
        return
    last = Text("q or Ctrl-C ends this.", style="dim")
    live = Live(console=console, screen=True, auto_refresh=False, vertical_overflow="crop")
    with contextlib.suppress(KeyboardInterrupt), _keys() as leaves, live:
        while not stop.is_set():
            live.update(Group(last, draw()), refresh=True)
            if leaves(stop):
                return


@contextlib.contextmanager
def _keys() -> Iterator[Callable[[threading.Event], bool]]:
    """Yield a function that waits `EVERY_S`. It returns True if ``stop`` is set or q was pressed."""
    if not sys.stdin.isatty():
        yield lambda stop: stop.wait(EVERY_S)
        return
    before = termios.tcgetattr(sys.stdin)

    def leaves(stop: threading.Event) -> bool:
        pressed, _, _ = select.select([sys.stdin], [], [], EVERY_S)
        typed = os.read(sys.stdin.fileno(), 64) if pressed else b"none"
        return stop.is_set() or not typed or b"q" in typed.lower()

    try:
        tty.setcbreak(sys.stdin)
        yield leaves
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
