"""One word for one thing: words that the project has given up appear in none of its files, and no two classes of the
package have the same name.
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
GIVEN_UP = {
    "lane": "worker pool",
    "tenant": "logical worker",
    "tenancy": "assignment",
    "homeless": "unassigned",
    "casualty": "failure",
    "casualties": "failures",
    "staffing": "scaling",
    "wish": "request",
    "unwilling": "resizing",
    "hush": "clear",
    "bell": "wakeup",
    "clockwork": "simulator",
    "depth": "prefetch",
    "look-ahead": "prefetch",
    "lookahead": "prefetch",
    "fetch_s": "load_s",
    "read_s": "load_s",
    "host wait": "wait",
    "stall_ratio": "wait_ratio",
    "predicted_stall": "predicted_wait",
    "dpex_stall_seconds_total": "dpex_wait_seconds_total",
}
"""What is not said, and what is said in its place."""
ARGUMENT_OF_PREFETCH = {
    *("dpex/loader/prefetched.py", "docs/how-to/feed-the-gpu.md"),
    *("tests/feed/test_background_prefetch.py", "tests/gpu/test_gpu_feed.py"),
}
"""Where `dpex.prefetch` has its ``depth``, as such functions have elsewhere: of batches that wait, drawn and made."""
MAKE_BATCHES = ("core", "engine", "pools", "worker", "transport", "autotune", "measure")
"""Folders in which a host could only be a worker or a machine. Elsewhere it is a part of an address."""
FOREIGN = {".png", ".json", ".c"}


def texts() -> Iterator[tuple[str, str]]:
    """Path and text of every file of the project but this one, pictures and other people's code."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    for name in listed:
        path = ROOT / name
        if path.suffix not in FOREIGN and "uPlot" not in name and path != Path(__file__).resolve() and path.is_file():
            yield name, path.read_text()


def words(line: str) -> str:
    """The line with its words apart: of `FakeLane` and `fake_lane` they are fake and lane."""
    apart = re.sub(r"([a-z])([A-Z])", r"\1 \2", line)
    return f"{apart} {apart.replace('_', ' ')}".lower()


def places(word: str, folders: tuple[str, ...] = ()) -> list[str]:
    """Where it is said, alone, in the plural, or as a part of a name."""
    said = re.compile(rf"(?<![a-z_]){re.escape(word)}s?(?![a-z_])")
    return [
        f"{name}:{number}: {line.strip()}"
        for name, text in texts()
        if not folders or name.startswith(folders)
        for number, line in enumerate(text.splitlines(), 1)
        if said.search(words(line))
    ]


@pytest.fixture(scope="module", autouse=True)
def _in_a_checkout() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("git lists the files: not a checkout")


@pytest.mark.parametrize("word", GIVEN_UP)
def test_a_word_that_was_given_up_is_not_said(word: str) -> None:
    found = [place for place in places(word) if word != "depth" or place.split(":")[0] not in ARGUMENT_OF_PREFETCH]
    assert not found, f"say {GIVEN_UP[word]!r}"


def test_what_makes_batches_is_a_worker_and_a_computer_is_a_machine() -> None:
    assert not [
        place
        for place in places("host", tuple(f"dpex/{folder}/" for folder in MAKE_BATCHES))
        if not re.search(r"hostname|localhost|host:port|host-to-device", place)
    ]


def test_no_two_classes_have_the_same_name() -> None:
    found = defaultdict(list)
    for path in sorted((ROOT / "dpex").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                found[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert len(found) > 100, "the reader of classes sees too few"
    assert not {name: places for name, places in found.items() if len(places) > 1}


def test_a_word_is_found_in_names_of_every_form() -> None:
    assert all("lane" in words(form).split() for form in ("lane", "a_lane", "FakeLane", "LANE", "_LANE_OF"))
