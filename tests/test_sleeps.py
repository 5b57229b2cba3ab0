"""No test sleeps, but where time is what it is about, and then by one name: `workload.wait_as_work`.

A test that sleeps until something has probably happened is slow where it has happened long since, and fails where the
machine has much else to do. `waiting.until` and `waiting.meet` wait for it instead.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
SLEEPS = {
    "waiting.py": 1,  # `until`, between two looks
    "workload.py": 1,  # `wait_as_work`
    # What follows stands for scripts of users, which `dpex run` and launchers start, and which import nothing of ours.
    "cli/scripts/ddp.py": 1,  # `until`, by hand
    "cli/scripts/material.py": 1,  # a transform that waits
    "cli/scripts/waits.py": 2,  # a sample and a step that wait
}
"""Files of the tests, and how often they sleep."""
IN_A_SCRIPT = re.compile(r"\bsleep\(|\bEvent\(\)\.wait\([^)]")
"""Tests also hold scripts, as strings, that run in processes of their own."""


def sleeps(text: str) -> list[int]:
    """Lines that sleep, or that get hold of `time.sleep`; to wait for an event that nobody else knows is to sleep."""
    return [node.lineno for node in ast.walk(ast.parse(text)) if is_sleep(node)]  # type: ignore[attr-defined]


def is_sleep(node: ast.AST) -> bool:
    match node:
        case ast.Attribute(value=ast.Name(id="time" | "asyncio") | ast.Call(), attr="sleep"):
            return True
        case ast.Call(func=ast.Name(id="sleep")):
            return True
        case ast.ImportFrom(module="time" | "asyncio", names=names):
            return any(each.name == "sleep" for each in names)
        case ast.Call(func=ast.Attribute(value=ast.Call(func=event), attr="wait"), args=args, keywords=keywords):
            return ast.unparse(event).endswith("Event") and bool(args or keywords)
        case ast.Constant(value=str(text)):
            return IN_A_SCRIPT.search(text) is not None
    return False


def test_only_work_that_takes_time_sleeps() -> None:
    paths = (path for path in TESTS.rglob("*.py") if path != Path(__file__).resolve())
    found = {path.relative_to(TESTS).as_posix(): lines for path in paths if (lines := sleeps(path.read_text()))}
    remedy = "wait with `waiting.until`; work that takes time calls `workload.wait_as_work`"
    assert {name: len(lines) for name, lines in found.items()} == SLEEPS, f"{remedy}: {found}"


@pytest.mark.parametrize(
    "text",
    [
        "import time\ntime.sleep(1)",
        "import time\nnap = time.sleep",
        "from time import monotonic, sleep as nap",
        "__import__('time').sleep(1)",
        "import asyncio\nasync def nap(): await asyncio.sleep(1)",
        "import threading\nthreading.Event().wait(0.1)",
        "from threading import Event\nEvent().wait(timeout=0.1)",
        'SCRIPT = """\nimport time\ntime.sleep(1)\n"""',
        'SCRIPT = f"""\n{PREAMBLE}\n__import__(\'time\').sleep({seconds})\n"""',
        "SCRIPT = 'import threading; threading.Event().wait(0.1)'",
    ],
)
def test_a_sleep_is_found_in_every_form(text: str) -> None:
    assert len(sleeps(text)) == 1


@pytest.mark.parametrize(
    "text",
    [
        "threading.Event().wait()",
        "done.wait(60.0)",
        "wakeup.sleep(1)",
        "patch.setattr('module.time.sleep', naps.append)",
        "patch.setattr(module, 'sleep', clock.advance)",
        "wait_as_work(0.1)",
    ],
)
def test_what_waits_for_something_is_no_sleep(text: str) -> None:
    assert not sleeps(text)
