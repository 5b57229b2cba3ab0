"""The page in a real Chromium, while a script trains whose wait is planted."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from packages import need
from waiting import until

from dpex.schedule.names import encodable
from dpex.telemetry.http.frames import COLUMNS
from dpex.telemetry.http.history import EVERY_S, NOW_S

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = '<img src=x onerror="document.title=1"> & "train" \\ \'\udcff'
SHOWN = encodable(HOSTILE)
PATIENCE_MS = 60_000
SHOWN_FRAMES = math.ceil(NOW_S / EVERY_S)
"""What the page shows is made of these."""

need("playwright", "playwright is not installed (dpex[dev])")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium (Debian: chromium)"),
    pytest.mark.skipif(sys.platform != "linux", reason="the planted script needs select on its input"),
]


class Training:
    """`planted.py` in a process of its own."""

    def __init__(self, directory: Path) -> None:
        environment = {**os.environ, "DPEX_METRICS_DIR": str(directory)}
        self.process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("planted.py")), HOSTILE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment | {"PYTHONPATH": str(ROOT)},
        )
        self.port = int(self.line())
        self.url = f"http://127.0.0.1:{self.port}/"

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def plant(self, load_ms: float, train_ms: float) -> None:
        """From now on batches and steps take so long; returns when what a page is told is all of that."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{load_ms} {train_ms}\n")
        self.process.stdin.flush()
        assert self.line() == "done\n"
        now = self.frame()  # the one that has begun holds some of what was before
        until(lambda: self.frame() > now + 1 + SHOWN_FRAMES, pause_s=EVERY_S / 4, patience_s=60)

    def state(self) -> Any:
        """Of the loader, by the endpoint."""
        with urllib.request.urlopen(f"{self.url}api/state", timeout=60) as answer:
            loaders = {one["name"]: one for one in json.loads(answer.read())["loaders"]}
        return loaders[SHOWN]

    def frame(self) -> int:
        """The number of the latest."""
        frames = self.state()["frames"]
        return int(frames[-1][COLUMNS.index("number")]) if frames else 0

    def wait_ratio(self) -> float:
        return float(self.state()["now"]["wait_ratio"])

    def end(self) -> None:
        self.process.kill()
        self.process.communicate()


@dataclass
class Seen:
    """A page, and what it complained about and asked for."""

    page: Any
    complaints: list[str] = field(default_factory=list)
    urls: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.page.set_default_timeout(PATIENCE_MS)
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.urls.append(request.url))

    def text(self, selector: str) -> str:
        return str(self.page.inner_text(selector))

    def open(self, url: str) -> None:
        self.page.goto(url)
        self.page.wait_for_selector("#link[data-level=good]")

    def wait_percent(self) -> float:
        found = re.fullmatch(r"([\d.]+) %", self.text("#wait"))
        assert found, self.text("#wait")
        return float(found[1])


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    found = Training(tmp_path_factory.mktemp("sd"))
    found.plant(40, 60)
    yield found
    found.end()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def opened(browser: Any) -> Iterator[Callable[..., Seen]]:
    pages = []

    def opened(**options: Any) -> Seen:
        pages.append(browser.new_page(**options))
        return Seen(pages[-1])

    yield opened
    for page in pages:
        page.close()


def ground(seen: Seen) -> list[int]:
    color = seen.page.evaluate("getComputedStyle(document.body).backgroundColor")
    return [int(number) for number in re.findall(r"\d+", color)[:3]]


def drawn(seen: Seen) -> list[int]:
    """Pixels that are not transparent, for each chart."""
    counted: list[int] = seen.page.evaluate(
        """[...document.querySelectorAll("canvas")].map((canvas) => {
            const pixels = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data;
            let count = 0;
            for (let i = 3; i < pixels.length; i += 4) count += pixels[i] > 0;
            return count;
        })"""
    )
    return counted


def test_how_it_is_known_now_and_in_the_whole_run(training: Training, opened: Callable[..., Seen]) -> None:
    seen = opened()
    seen.open(training.url)
    seen.page.wait_for_selector("#evidence:not([hidden])")
    assert not seen.page.is_visible("#sections")
    seen.page.click("summary")
    for part in ("timed around every next()", "What a batch takes", "instead of 0", "What was not measured"):
        assert part in seen.text("#sections")
    assert "latest stretch" in seen.text("#verdict-about") or "so far" in seen.text("#verdict-about")
    seen.page.check("[name=stretch][value=run]")
    seen.page.wait_for_selector("#verdict-about:text('About the whole run:')")
    assert seen.page.is_visible("#sections")  # stays open
    assert seen.complaints == []


def test_the_network_from_machines_of_the_cluster_is_shown(training: Training, opened: Callable[..., Seen]) -> None:
    """The planted script has none: they are put into what the endpoint answers."""
    way = {"name": SHOWN, "bytes_per_s": 42e6, "bandwidth": 110e6, "round_trip_s": 0.05, "loss": 0.01}

    def with_machines(route: Any) -> None:
        answer = route.fetch()
        state = answer.json()
        for loader in state["loaders"]:
            loader |= {"machines": [way], "excluded": 1}
        route.fulfill(response=answer, json=state)

    seen = opened()
    seen.open(training.url)
    assert seen.page.is_hidden("#network")
    seen.page.route("**/api/state*", with_machines)
    seen.page.wait_for_selector("#network:not([hidden])")
    for part in ("42 MB/s", "110 MB/s", "50 ms", "1.0 %", SHOWN.partition(" ")[0], "1 node of the cluster gets"):
        assert part in seen.text("#network")
    assert seen.page.locator("img").count() == 1
    assert seen.complaints == []


def test_another_loader_can_be_chosen_and_names_are_text(training: Training, opened: Callable[..., Seen]) -> None:
    seen = opened()
    seen.open(training.url)
    options = "[...document.querySelector('#loader').options].map((o) => o.text)"
    assert seen.page.evaluate(options) == [SHOWN, "validation"]
    assert seen.page.locator("img").count() == 1  # the icon
    seen.page.select_option("#loader", "validation")
    seen.page.wait_for_selector("#verdict-text:text('3 batches in')")
    assert "between epochs" in seen.text("#verdict")
    assert seen.page.is_hidden("#first")
    assert seen.text("#wait") == "\u2013"
    assert "3 delivered so far" in seen.text("#ready-note")


@pytest.mark.parametrize("width", [360, 1280])
def test_nothing_sticks_out(training: Training, opened: Callable[..., Seen], width: int) -> None:
    seen = opened(viewport={"width": width, "height": 740})
    seen.open(training.url)
    seen.page.wait_for_selector("#evidence:not([hidden])")
    seen.page.click("summary")
    assert seen.page.evaluate("document.documentElement.scrollWidth") <= width
    charts = seen.page.evaluate("[...document.querySelectorAll('canvas')].map((c) => c.getBoundingClientRect().right)")
    assert max(charts) <= width


@pytest.mark.parametrize(("scheme", "dark"), [("light", False), ("dark", True)])
def test_light_and_dark(training: Training, opened: Callable[..., Seen], scheme: str, dark: bool) -> None:
    seen = opened(color_scheme=scheme)
    seen.open(training.url)
    assert (max(ground(seen)) < 64) == dark
    assert (min(ground(seen)) > 192) != dark
    seen.page.emulate_media(color_scheme="light" if dark else "dark")
    assert (max(ground(seen)) < 64) != dark
    assert seen.complaints == []


# -- tests after which the others would not hold: new causes of waits, and the end ------------------------------------


@pytest.mark.alone  # what waits is told from what computes by the load of the machine
def test_what_is_planted_is_shown_and_goes(training: Training, opened: Callable[..., Seen]) -> None:
    seen = opened(viewport={"width": 1280, "height": 800})
    seen.open(training.url)
    assert seen.page.input_value("#loader") == SHOWN  # the busiest
    assert 30 <= seen.wait_percent() <= 50
    assert abs(seen.wait_percent() - 100 * training.wait_ratio()) < 5
    assert seen.page.get_attribute("[data-tile=wait]", "data-level") == "bad"
    seen.page.wait_for_selector("#verdict-title:text('storage-bound reading')")
    assert re.search(r"waits for \d+\s% of its time, because making batches waits", seen.text("#verdict-text"))
    assert re.search(r"First: .* batches/s .* and a wait of about \d+\s% \(", seen.text("#first"))
    assert re.search(r"\d+ batches in [\d.]+ s, at .* [Cc]onfidence 0\.\d\d", seen.text("#verdict-about"))
    assert re.search(r"reading data\s+\d\d", seen.text("#parts"))
    assert "sample" in seen.text("#speed-note")
    assert "the training process" in seen.text("#workers-note")
    assert 'num_workers="auto"' in seen.text("#no-decisions")

    training.plant(0, 60)
    until(lambda: seen.wait_percent() < 5, pause_s=0.1)  # the page asks every second
    assert seen.page.get_attribute("[data-tile=wait]", "data-level") == "good"

    assert seen.page.get_attribute("[data-chart=wait] .plot", "aria-label").startswith("Time lost to waiting, now: ")
    assert seen.complaints == []
    assert {url.split("/")[2] for url in seen.urls} == {f"127.0.0.1:{training.port}"}
    assert len(drawn(seen)) == 4
    assert min(drawn(seen)) > 500


def test_a_process_that_ends_is_said_to_be_gone(training: Training, opened: Callable[..., Seen]) -> None:
    seen = opened()
    seen.open(training.url)
    training.end()
    seen.page.wait_for_selector("#lost:not([hidden])")
    assert "No connection to the training process since" in seen.text("#lost")
    assert seen.text("#link") == "no connection"
