"""Training scripts in processes of their own, and whatever they leave behind.

`Forker` is a process that has imported torch and dpex. It forks a trainer for each script, which saves the two seconds
that these imports take. A trainer ends as any interpreter does: its script's last line, an exception or a signal.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from families import is_alive
from waiting import until

MARK = "DPEX_TEST_FAMILY"
"""Variable that a forker and all its descendants have in their environment, so that orphans are found as well."""
PATIENCE_S = 60.0
LOOK_S = 0.02
"""Between two looks at all processes of the machine, which take the CPU for milliseconds."""
TESTS = Path(__file__).parent
NOTHING = "left: 0 processes, 0 threads"

PREAMBLE = """
import contextlib, gc, multiprocessing, os, signal, sys, threading, time, warnings
import psutil
import torch
from multiprocessing import shared_memory
from dpex import DpexDataLoader
from families import Augmented
from waiting import until
from workload import wait_as_work

for number in (signal.SIGHUP, signal.SIGTERM):  # who runs the tests may ignore them, as nohup does
    signal.signal(number, signal.SIG_DFL)

# Names in shared memory tell whose they are; torch's contain the process's number.
multiprocessing.current_process()._config["semprefix"] = "/" + os.environ["DPEX_TEST_FAMILY"]
shared_memory._SHM_NAME_PREFIX = "/" + os.environ["DPEX_TEST_FAMILY"]

def loader(length=400, **options):
    options = {"batch_size": 2, "num_workers": 2, **options}
    return DpexDataLoader(Augmented(length, 0.001, extra=700), **options)

def descendants():
    return [p for p in psutil.Process().children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]

def report_leftovers(threads):
    with contextlib.suppress(AssertionError):
        until(lambda: not descendants(), 30, pause_s=0.01)
    more = set(threading.enumerate()) - threads
    print(f"left: {len(descendants())} processes, {len(more)} threads", flush=True)

def say_ready():
    print("ready", flush=True)

THREADS = set(threading.enumerate())
"""
FORKER = """
from pathlib import Path

for command in sys.stdin:
    folder = Path(command.strip())
    trainer = os.fork()
    if trainer == 0:
        break
    print(trainer, flush=True)
    status = os.waitstatus_to_exitcode(os.waitpid(trainer, 0)[1])
    print(status, flush=True)
else:
    sys.exit()

os.setsid()
os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
os.dup2(os.open(folder / "out", os.O_WRONLY), 1)
os.dup2(os.open(folder / "err", os.O_WRONLY), 2)
exec(compile((folder / "trainer.py").read_text(), "trainer.py", "exec"))
"""
"""Reads folders, a line each. Prints the trainer's number and, once it has ended, its exit code."""


class Trainer:
    """A forked trainer. Its output goes to files."""

    def __init__(self, forker: Forker, pid: int) -> None:
        self._forker = forker
        self.pid = pid

    @property
    def out(self) -> str:
        """What it has printed so far."""
        return self._forker.printed("out")

    def end(self) -> tuple[int, str, str]:
        """Wait until it ends. Return its exit code, what it printed, and what it printed to stderr."""
        return self._forker.code(), self.out, self._forker.printed("err")


class Forker:
    """A process that forks trainers, one at a time, and finds what they started."""

    def __init__(self, folder: Path, preamble: str = "", **environment: str) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex[:8]
        self.shared_before = names_in_shared_memory()
        self._has_trainer = False
        paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + preamble + FORKER],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def start(self, body: str) -> Trainer:
        """Fork a trainer that runs this script."""
        (self.folder / "trainer.py").write_text(body)
        for name in ("out", "err"):
            (self.folder / name).write_text("")
        assert self._process.stdin is not None
        self._process.stdin.write(f"{self.folder}\n")
        self._process.stdin.flush()
        self._has_trainer = True
        return Trainer(self, int(self._line()))

    def run(self, body: str) -> tuple[int, str, str]:
        """Return the script's exit code, what it printed, and what it printed to stderr."""
        return self.start(body).end()

    def start_until_ready(self, body: str) -> Trainer:
        """Return once the script has called ``say_ready``."""
        trainer = self.start(body)
        until(lambda: trainer.out.endswith("\n"), told=lambda: self.printed("err"))
        assert trainer.out == "ready\n", (trainer.out, self.printed("err"))
        assert len(self.members()) >= 3  # the trainer, the prepared process, a worker
        return trainer

    def _line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def code(self) -> int:
        """Exit code of the trainer, once it has ended."""
        self._has_trainer = False
        return int(self._line())

    def printed(self, name: str) -> str:
        """What the trainer has written to ``out`` or ``err``."""
        return (self.folder / name).read_text()

    def members(self) -> list[int]:
        """Living processes that bear the mark, whoever their parent is, without the forker."""
        return [one.pid for one in psutil.process_iter() if one.pid != self._process.pid and self._is_member(one)]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            return self.mark.encode() in environment and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False

    def assert_nothing_is_left(self) -> None:
        """Wait until no process and no shared memory of a trainer is left."""
        until(lambda: not self.members(), PATIENCE_S, pause_s=LOOK_S)
        until(lambda: not self.shared_files(), PATIENCE_S, pause_s=LOOK_S)

    def shared_files(self) -> set[str]:
        """New files in /dev/shm that a trainer may have made, as against others on this machine."""
        return {name for name in names_in_shared_memory() - self.shared_before if self._may_have_made(name)}

    def _may_have_made(self, name: str) -> bool:
        torchs = re.match(r"torch_(\d+)_", name)
        if torchs is None:
            return name.removeprefix("sem.").startswith((self.mark, "dpex"))
        maker = int(torchs.group(1))
        return not is_alive(maker) or maker in self.members()

    def clear(self) -> None:
        """Kill what a failed test has left."""
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._has_trainer:
            self.code()

    def close(self) -> None:
        """Kill the forker and all members."""
        self.clear()
        self._process.kill()
        self._process.communicate(timeout=60)


@pytest.fixture(scope="module")
def forker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    """Of all tests of a module."""
    made = Forker(tmp_path_factory.mktemp("trainers"))
    yield made
    made.close()


@pytest.fixture
def family(forker: Forker) -> Iterator[Forker]:
    """Without what another test has left. What is in shared memory by now belongs to others."""
    forker.shared_before = names_in_shared_memory()
    yield forker
    forker.clear()


def names_in_shared_memory() -> set[str]:
    """Files in /dev/shm."""
    return {path.name for path in Path("/dev/shm").iterdir()}
