"""What metrics cost: `python -m benchmarks.overhead`.

First the time per batch without and with `metrics_port`, in turns within one process, so that both meet the same
machine: the loaders do next to nothing themselves, and nobody scrapes. Then a training loop while another process
scrapes 5 times a second, in turns too: a decoy in a process of its own, which costs the machine as much, and the
training process itself; with one loader, and with many, whose metrics take longer to render. Single rounds of that
differ by far more than what is looked for, so there are many, and the mean is printed with its standard error.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from statistics import mean, median, stdev
from typing import Any

import torch

from benchmarks.machine import load, machine
from dpex import DpexDataLoader
from dpex.telemetry.exporter import exporter

KINDS: dict[str, dict[str, Any]] = {
    "torch's in-process iterator": {"num_workers": 0},
    "engine, in-process": {"num_workers": 0, "seeding": "batch"},
    "engine, 2 workers": {"num_workers": 2, "seeding": "batch"},
}
SCRAPER = """
import sys, time, urllib.request
port, every_s, count = int(sys.argv[1]), float(sys.argv[2]), 0
began = time.perf_counter()
print(flush=True)
while True:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        answer.read()
    count += 1
    print(count / (time.perf_counter() - began), flush=True)
    time.sleep(max(0.0, began + count * every_s - time.perf_counter()))
"""
DECOY = """
import sys, threading, urllib.request
from http import HTTPStatus
from dpex.telemetry.http.server import Answer, Server
body = sys.stdin.buffer.read(int(sys.argv[1]))
server = Server("127.0.0.1", 0, lambda request: Answer(HTTPStatus.OK, [], body))
server.start()
print(server.port, flush=True)
threading.Event().wait()
"""
SCRAPE_EVERY_S = 0.2
STORM_S = 1.0
MANY = 8
MOST_US, MOST_LOSS = 5.0, 0.01
"""What metrics may cost: per batch, and of a training loop that is scraped 5 times a second."""


class Floats(torch.utils.data.Dataset[torch.Tensor]):
    """Five floats that are there already."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.sample = torch.zeros(5)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.sample


def seconds_for(batches: Iterator[Any], count: int) -> float:
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    return time.perf_counter() - began


def cost_per_batch(kind: dict[str, Any], rounds: int, count: int) -> tuple[float, float, float]:
    """Microseconds per batch off and on, and the median of the differences within a round."""
    data = Floats(count * (rounds + 2))
    with DpexDataLoader(data, **kind) as off, DpexDataLoader(data, metrics_port=0, **kind) as on:
        passes = [iter(off), iter(on)]
        for batches in passes:
            seconds_for(batches, count)
        pairs = []
        for number in range(rounds):
            order = (0, 1) if number % 2 else (1, 0)
            taken = {which: seconds_for(passes[which], count) / count * 1e6 for which in order}
            pairs.append((taken[0], taken[1]))
        return median(a for a, _ in pairs), median(b for _, b in pairs), median(b - a for a, b in pairs)


def train(batches: Iterator[Any], seconds: float, work: torch.Tensor) -> float:
    """Batches per second of a loop that computes about two milliseconds a step."""
    count, began = 0, time.perf_counter()
    while (now := time.perf_counter()) - began < seconds:
        next(batches)
        while time.perf_counter() - now < 0.002:
            work @ work
        count += 1
    return count / (time.perf_counter() - began)


@contextmanager
def storm(port: int) -> Iterator[list[float]]:
    """Scrapes in another process; the list holds their rate in the end."""
    rates: list[float] = []
    arguments = [sys.executable, "-c", SCRAPER, str(port), str(SCRAPE_EVERY_S)]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as scraper:
        assert scraper.stdout is not None
        scraper.stdout.readline()
        try:
            yield rates
        finally:
            scraper.kill()
            lines = scraper.stdout.read().split()
            rates.append(float(lines[-1]) if lines else 0.0)


@contextmanager
def decoy(port: int) -> Iterator[int]:
    """Another process, which answers as much as is served at that port; its port."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        body = answer.read()
    arguments = [sys.executable, "-c", DECOY, str(len(body))]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(body)
        process.stdin.flush()
        try:
            yield int(process.stdout.readline())
        finally:
            process.kill()


def loss_under_storm(rounds: int, loaders: int) -> tuple[float, float, float, float]:
    """The loss against storms at the decoy, mean over the rounds, and its standard error; scrapes per second; and the
    share of a core that this process's other threads took: for no longer can they have kept the interpreter from
    training.
    """
    work, losses, rates, others = torch.ones(64, 64), [], [], []
    with ExitStack() as stack:
        for _ in range(loaders - 1):
            list(stack.enter_context(DpexDataLoader(Floats(100), num_workers=1, seeding="batch", metrics_port=0)))
        loader = stack.enter_context(DpexDataLoader(Floats(10**7), num_workers=1, seeding="batch", metrics_port=0))
        batches = iter(loader)
        train(batches, STORM_S, work)
        elsewhere = stack.enter_context(decoy(exporter.port or 0))
        for number in range(rounds):
            found = {}
            for port in (elsewhere, exporter.port or 0) if number % 2 else (exporter.port or 0, elsewhere):
                with storm(port) as rate:
                    before = time.process_time() - time.thread_time()
                    found[port] = train(batches, STORM_S, work)
                    spent = (time.process_time() - time.thread_time() - before) / STORM_S
                if port != elsewhere:
                    rates += rate
                    others.append(spent)
            losses.append(1.0 - found[exporter.port or 0] / found[elsewhere])
    return mean(losses), stdev(losses) / len(losses) ** 0.5, median(rates), median(others)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=60, help="of the first part (60)")
    parser.add_argument("--batches", type=int, default=500, help="per round (500)")
    parser.add_argument("--storms", type=int, default=20, help="rounds of the second part, at least 2 (20)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    where = machine()
    print(f"{where['processor']}, {where['cores']} cores, load {load()}")
    print(f"per batch, median of {options.rounds} turns; target: under {MOST_US:g} us")
    with tempfile.TemporaryDirectory() as directory:
        os.environ["DPEX_METRICS_DIR"] = directory
        for name, kind in KINDS.items():
            off, on, difference = cost_per_batch(kind, options.rounds, options.batches)
            print(f"{name:30} {off:8.2f} us off {on:8.2f} us on {on / off:6.3f}x {difference:+6.2f} us")
        print(f"scraped 5 times a second, mean of {options.storms} turns; target: under {100 * MOST_LOSS:g} % lost")
        for loaders in (1, MANY):
            loss, error, rate, others = loss_under_storm(options.storms, loaders)
            print(
                f"{loaders} loader{'s' if loaders > 1 else ' ':23} {100 * loss:+5.2f} % (+- {100 * error:.2f}) lost",
                end="",
            )
            print(f" at {rate:.0f}/s; the endpoint takes {100 * others:.1f} % of a core")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
