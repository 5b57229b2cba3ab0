"""See num_workers="auto" find its way: what it decides, why, what it expected, and what it got.

    python examples/auto.py                  # under a minute, on any laptop; no cluster
    python examples/auto.py --seconds 20     # the same in a hurry

Photographs are decoded and cropped for real. Two things are sleeps, so that this shows the same on any machine: the
training step, which stands for a GPU, and the storage the files come from. A few workers cannot keep up with them.
First a fixed number of workers trains on that; then "auto" does, from a cold start. While it trains, the storage
becomes slow; later the step becomes long, and workers are given back. Each line with a bar is a second of training:
the bar is the stall, the share of the time in which the training loop waited for a batch.
"""

import argparse
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpex import DpexDataLoader
from pictures import Photographs

BATCH = 16
ENDLESS = 200_000
BAR = 20
QUICK_S, SLOW_S = 0.012, 0.025
"""What the storage takes for a file."""
STEP_S, LONG_STEP_S = 0.05, 0.25
ENDING = 1 / 3
"""The part of an act by whose end things have settled."""


@dataclass(frozen=True, kw_only=True)
class Act:
    """Some seconds of training under one storage and one step."""

    title: str
    seconds: float
    storage_s: float = QUICK_S
    step_s: float = STEP_S


class Spell:
    """Batches, seconds and seconds waited of a stretch of training."""

    def __init__(self) -> None:
        self.batches = 0
        self.seconds = self.waited_s = 0.0

    def add(self, waited_s: float, seconds: float) -> None:
        """One batch, which was waited for, and its step."""
        self.batches += 1
        self.waited_s += waited_s
        self.seconds += seconds

    @property
    def stall(self) -> float:
        """Share of the time spent waiting, 0 to 1."""
        return self.waited_s / self.seconds if self.seconds else 0.0

    @property
    def rate(self) -> float:
        """Batches per second."""
        return self.batches / self.seconds if self.seconds else 0.0


@dataclass(kw_only=True)
class Result:
    """An act with one loader. `whole`: from the first batch on; `ending`: the last third. `workers`: at its end."""

    loader: str
    act: Act
    whole: Spell
    ending: Spell
    workers: int = 0


class Show:
    """Trains, and prints what there is to see as it happens."""

    def __init__(self, console: Console, photographs: Photographs) -> None:
        self.console = console
        self.photographs = photographs
        self.results: list[Result] = []
        self.began = time.monotonic()

    def train(self, name: str, loader: Any, acts: list[Act], news: Callable[[], None] = lambda: None) -> None:
        """One pass over endless data, act after act."""
        batches: Iterator[Any] | None = None
        for act in acts:
            self.console.print(f"\n[bold]{name}: {act.title}[/bold]")
            self.photographs.storage_s.fill_(act.storage_s)
            if batches is None:
                batches = iter(loader)
                next(batches)  # how long workers take to start is not the subject
            result = Result(loader=name, act=act, whole=Spell(), ending=Spell())
            self.results.append(result)
            self.run(act, batches, result, loader, news)

    def run(self, act: Act, batches: Iterator[Any], result: Result, loader: Any, news: Callable[[], None]) -> None:
        start = asked = time.monotonic()
        second = Spell()
        while asked < start + act.seconds:
            next(batches)
            got = time.monotonic()
            time.sleep(act.step_s)
            done = time.monotonic()
            ends = [result.ending] if asked > start + (1 - ENDING) * act.seconds else []
            for spell in (second, result.whole, *ends):
                spell.add(got - asked, done - asked)
            result.workers = loader.stats().lanes["local"].running
            news()
            asked = done
            if second.seconds >= 1:
                self.second(second, result.workers)
                second = Spell()

    def second(self, spell: Spell, workers: int) -> None:
        full = round(spell.stall * BAR)
        color = "red" if spell.stall > 0.2 else "yellow" if spell.stall > 0.05 else "green"
        bar = f"[{color}]{'█' * full}[/]{'·' * (BAR - full)}"
        self.console.print(
            f"{self.elapsed_s():5.1f} s  {bar} stall {spell.stall:4.0%}, {spell.rate:4.1f}/s, {workers} workers",
            highlight=False,
        )

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began


class News:
    """Prints each decision of a loader as it is taken, and later what it brought."""

    def __init__(self, show: Show, loader: DpexDataLoader[Any]) -> None:
        self.show = show
        self.loader = loader
        self.told = 0
        self.open: list[int] = []

    def __call__(self) -> None:
        decisions = self.loader.decisions
        for number in range(self.told, len(decisions)):
            self.decided(number + 1, decisions[number])
            self.open.append(number)
        self.told = len(decisions)
        for number in [n for n in self.open if decisions[n].outcome is not None]:
            self.measured(number + 1, decisions[number].outcome)
            self.open.remove(number)

    def decided(self, number: int, decision: Any) -> None:
        self.say(f"decision {number}: {decision.text}")

    def measured(self, number: int, outcome: Any) -> None:
        verdict = "kept" if outcome.kept else "undone"
        self.say(f"decision {number} brought {outcome.rate:.1f}/s, stall {outcome.stall:.0%}: {verdict}")

    def say(self, text: str) -> None:
        lead = f"{self.show.elapsed_s():5.1f} s  ► "
        wide = max(60, self.show.console.width)
        lines = textwrap.fill(text, wide, initial_indent=lead, subsequent_indent=" " * len(lead))
        self.show.console.print(f"[cyan]{escape(lines)}[/]", highlight=False)


def acts_of(seconds: float) -> tuple[list[Act], list[Act]]:
    """For the fixed setting, and for "auto"; together they take so long."""
    quick = f"storage answers in {QUICK_S * 1e3:.0f} ms, a step takes {STEP_S * 1e3:.0f} ms"
    slow = f"the storage has become slow: {SLOW_S * 1e3:.0f} ms"
    longer = f"the step has become long: {LONG_STEP_S * 1e3:.0f} ms"
    fixed = [Act(title=quick, seconds=0.12 * seconds), Act(title=slow, seconds=0.1 * seconds, storage_s=SLOW_S)]
    auto = [
        Act(title=quick, seconds=0.28 * seconds),
        Act(title=slow, seconds=0.26 * seconds, storage_s=SLOW_S),
        Act(title=longer, seconds=0.24 * seconds, storage_s=SLOW_S, step_s=LONG_STEP_S),
    ]
    return fixed, auto


def table_of(results: list[Result]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for heading in ("loader", "storage", "step", "batches/s", "stall", "last third", "workers at the end"):
        table.add_column(heading, justify="left" if heading == "loader" else "right")
    for result in results:
        act, whole = result.act, result.whole
        times = f"{act.storage_s * 1e3:.0f} ms", f"{act.step_s * 1e3:.0f} ms"
        stalls = f"{whole.stall:.0%}", f"{result.ending.stall:.0%}"
        table.add_row(result.loader, *times, f"{whole.rate:.1f}", *stalls, str(result.workers))
    return table


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=50, help="of training in all (50)")
    parser.add_argument("--num-workers", type=int, default=2, help="workers of the fixed setting (2)")
    return parser.parse_args()


def main() -> int:
    """0, or 130 after Ctrl-C."""
    options, console = parse(), Console()
    photographs = Photographs(ENDLESS, QUICK_S)
    fixed, auto = acts_of(options.seconds)
    show = Show(console, photographs)
    stopped = True
    with suppress(KeyboardInterrupt):
        settings: dict[str, Any] = {"batch_size": BATCH, "shuffle": True, "generator": torch.Generator().manual_seed(0)}
        with DpexDataLoader(photographs, **settings, num_workers=options.num_workers) as loader:
            show.train(f"fixed, {options.num_workers}", loader, fixed)
        with DpexDataLoader(photographs, **settings, num_workers="auto") as loader:
            show.train("auto", loader, auto, News(show, loader))
        stopped = False
    if stopped:
        console.print("\nstopped")
    console.print(table_of(show.results))
    return 130 if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
