"""What the examples draw: a line with a bar for each second of training, and each decision of the tuner in words.

Colours appear on a terminal only; in a file or a pipe the same lines are plain text. Everything fits the width of the
terminal, or 80 columns.
"""

import sys
import textwrap
import time
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

LINE_EVERY_S = 1.0
BAR_LEAST, BAR_MOST = 10, 40
BESIDE_BAR = 56
"""Columns that a line needs beside its bar."""
HIGH_WAIT, LOW_WAIT = 0.2, 0.05
"""Shares of the time: a bar is red above the first, green up to the second, and yellow between them."""
TEXT_LEAST, TEXT_MOST = 40, 100
"""Columns of a paragraph: longer lines are hard to read."""
INDENT = 10


@dataclass(kw_only=True)
class Stretch:
    """A stretch of training: its batches, its seconds, and the seconds in which the loop waited for a batch."""

    batches: int = 0
    seconds: float = 0.0
    wait_s: float = 0.0

    def add(self, other: "Stretch") -> None:
        self.batches += other.batches
        self.seconds += other.seconds
        self.wait_s += other.wait_s

    @property
    def wait_ratio(self) -> float:
        """Share of the time spent waiting, 0 to 1."""
        return self.wait_s / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds else 0.0


def total(stretches: Iterable[Stretch]) -> Stretch:
    """Return them as one."""
    found = Stretch()
    for one in stretches:
        found.add(one)
    return found


class Display:
    """Prints headings, paragraphs, lines with a bar, and tables."""

    def __init__(self, console: Console | None = None) -> None:
        if hasattr(sys.stdout, "reconfigure"):
            sys.stdout.reconfigure(errors="replace")  # a terminal without Unicode shows "?" and goes on
        self.console = console or Console(highlight=False)
        self.began_s = time.monotonic()

    def heading(self, text: str) -> None:
        """Print a heading, after an empty line."""
        self.console.print(f"\n[bold]{escape(text)}[/]")

    def paragraph(self, text: str, style: str = "none") -> None:
        """Print text wrapped at the width of the terminal."""
        self.console.print(Text(textwrap.fill(text, self.width), style=style))

    def facts(self, facts: dict[str, str]) -> None:
        """Print a row for each name and its text, which is wrapped beside the name."""
        columns = 2 + max(map(len, facts)) + 2
        for name, text in facts.items():
            lines = textwrap.wrap(text, self.width - columns)
            rest = [" " * columns + line for line in lines[1:]]
            self.console.print(Text(f"  {name}".ljust(columns), "bold").append("\n".join([lines[0], *rest]), "none"))

    def quote(self, text: str) -> None:
        """Print what a program says, wrapped, beside a bar."""
        for line in text.splitlines():
            for part in textwrap.wrap(line, self.width - 4) or [""]:
                self.console.print(Text("  │ ", "dim").append(part, "none"))

    def result(self, good: bool, text: str) -> None:
        """Print what a check found."""
        mark, style = ("✓", "green") if good else ("✗", "bold red")
        self.paragraph(f"{mark} {text}", style)

    def busy(self, text: str) -> AbstractContextManager[Any]:
        """Say what is being waited for, with a spinner where there is a terminal."""
        if self.console.is_terminal:
            return self.console.status(text)
        self.paragraph(text)
        return nullcontext()

    def second(self, stretch: Stretch, workers: int) -> None:
        """Print a line: the time, the share of the stretch spent waiting as a bar, the speed and the workers."""
        ratio, columns = stretch.wait_ratio, max(BAR_LEAST, min(BAR_MOST, self.width - BESIDE_BAR))
        style = "red" if ratio > HIGH_WAIT else "yellow" if ratio > LOW_WAIT else "green"
        full = round(ratio * columns)
        line = Text(f"{self.elapsed_s():5.1f} s  ").append("█" * full, style).append("·" * (columns - full))
        line.append(f"  wait {ratio:4.0%}  {stretch.rate:5.1f} batches/s  {workers:2} worker{'s' * (workers != 1)}")
        self.console.print(line, no_wrap=True, overflow="crop")

    def event(self, text: str, style: str = "cyan") -> None:
        """Print what happened just now, with the time."""
        first = f"{self.elapsed_s():5.1f} s".ljust(INDENT)
        lines = textwrap.fill(text, self.width, initial_indent=first, subsequent_indent=" " * INDENT)
        self.console.print(Text(lines, style))

    def table(self, headings: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
        """Print a table whose first column is text and whose others are numbers."""
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
        for number, name in enumerate(headings):
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(table)

    @property
    def width(self) -> int:
        """Columns for text."""
        return max(TEXT_LEAST, min(TEXT_MOST, self.console.width))

    def elapsed_s(self) -> float:
        """Return the time since the display was made."""
        return time.monotonic() - self.began_s


class Watch:
    """Measures a training loop, and prints a line a second and each decision when it is taken.

    `seconds`: what was measured so far, a `Stretch` for each line.
    """

    def __init__(self, display: Display, loader: Any) -> None:
        self.display = display
        self.loader = loader
        self.seconds: list[Stretch] = []
        self._second = Stretch()
        self._told = 0
        self._unjudged: list[int] = []

    def batches(self, source: Iterator[Any]) -> Iterator[Any]:
        """Yield what `source` yields; what the caller does with a batch before asking for the next is its step."""
        while True:
            asked_s = time.monotonic()
            try:
                batch = next(source)
            except StopIteration:
                return
            got_s = time.monotonic()
            yield batch
            self._add(Stretch(batches=1, wait_s=got_s - asked_s, seconds=time.monotonic() - asked_s))

    def _add(self, one: Stretch) -> None:
        self._second.add(one)
        self._tell_decisions()
        if self._second.seconds >= LINE_EVERY_S:
            self.display.second(self._second, self.workers)
            self.seconds.append(self._second)
            self._second = Stretch()

    @property
    def workers(self) -> int:
        """Workers that run now, wherever they are; 0 where the training process makes the batches itself."""
        if not hasattr(self.loader, "stats"):  # PyTorch's own loader
            return int(self.loader.num_workers)
        pools = self.loader.stats().pools
        return sum(pool.running for name, pool in pools.items() if name != "inline")

    def _tell_decisions(self) -> None:
        decisions = getattr(self.loader, "decisions", [])
        for number in range(self._told, len(decisions)):
            self.display.event(f"Decision {number + 1}: {decisions[number].text}")
            self._unjudged.append(number)
        self._told = len(decisions)
        for number in [one for one in self._unjudged if decisions[one].outcome is not None]:
            outcome = decisions[number].outcome
            self.display.event(
                f"Decision {number + 1} was {'kept' if outcome.kept else 'undone'}: it brought {outcome.rate:.1f} "
                f"batches/s, with {outcome.wait:.0%} of the time spent waiting for data."
            )
            self._unjudged.remove(number)
