"""However a training script ends, nothing of dpex stays: no process, no shared memory, no thread, no message.

Each case is a script of its own in a process of its own; what it started bears its mark in the environment, so that
orphans are found as well.
"""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from families import Augmented, is_alive
from waiting import until

from dpex import DpexDataLoader

pytestmark = pytest.mark.timeout(240)
MARK = "DPEX_TEST_FAMILY"
PATIENCE_S = 60.0
LOOK_S = 0.02
"""Between two looks at all processes of the machine, which take the CPU for milliseconds."""
ENDS_WITHIN_S = 200.0
"""Nothing here takes a tenth of that but on a machine that has much else to do."""
TESTS = Path(__file__).parent

PREAMBLE = """
import contextlib, gc, multiprocessing, os, sys, threading, time, warnings
import torch
from multiprocessing import shared_memory
from dpex import DpexDataLoader
from families import Augmented, ThreadSafe
from waiting import until
from workload import wait_as_work

# Names in shared memory tell whose they are; torch's contain the process's number.
multiprocessing.current_process()._config["semprefix"] = "/" + os.environ["DPEX_TEST_FAMILY"]
shared_memory._SHM_NAME_PREFIX = "/" + os.environ["DPEX_TEST_FAMILY"]

def in_threads(length=400, workers=5):
    # on one CPU: a process with five threads
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    warnings.simplefilter("ignore")
    return DpexDataLoader(
        ThreadSafe(length, 0.001, extra=700), batch_size=2, num_workers=workers, seeding="batch", timeout=30
    )

def loader(length=400, **options):
    options = {"batch_size": 2, "num_workers": 2, **options}
    return DpexDataLoader(Augmented(length, 0.001, extra=700), **options)

def descendants():
    import psutil
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
NOTHING = "left: 0 processes, 0 threads"


class Family:
    """A trainer script and everything that it starts."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.mark = uuid.uuid4().hex[:8]
        self.process: subprocess.Popen[str] | None = None
        self.shared_before = names_in_shared_memory()

    def start(self, body: str) -> subprocess.Popen[str]:
        script = self.folder / "trainer.py"
        script.write_text(PREAMBLE + body)
        paths = [str(TESTS.parent), str(TESTS), os.environ.get("PYTHONPATH", "")]
        self.process = subprocess.Popen(
            [sys.executable, str(script)],
            env={**os.environ, MARK: self.mark, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        return self.process

    def run(self, body: str) -> tuple[int, str, str]:
        """Return code, what it printed, and what it printed to stderr."""
        process = self.start(body)
        out, err = process.communicate(timeout=ENDS_WITHIN_S)
        return process.returncode, out, err

    def start_until_ready(self, body: str) -> subprocess.Popen[str]:
        process = self.start(body)
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n", process.communicate(timeout=60)[1]
        assert len(self.members()) >= 3  # the trainer, the prepared process, a worker
        return process

    def members(self) -> list[int]:
        """Living processes that bear the mark, whoever their parent is."""
        return [process.pid for process in psutil.process_iter() if self._is_member(process)]

    def _is_member(self, process: psutil.Process) -> bool:
        try:
            environment = Path(f"/proc/{process.pid}/environ").read_bytes()
            return self.mark.encode() in environment and process.status() != psutil.STATUS_ZOMBIE
        except (OSError, psutil.Error):
            return False

    def assert_nothing_is_left(self) -> None:
        until(lambda: not self.members(), PATIENCE_S, pause_s=LOOK_S)
        until(lambda: not self.shared_files(), PATIENCE_S, pause_s=LOOK_S)

    def shared_files(self) -> set[str]:
        """New files in /dev/shm that this family may have made, as against others on this machine."""
        return {name for name in names_in_shared_memory() - self.shared_before if self._may_have_made(name)}

    def _may_have_made(self, name: str) -> bool:
        torchs = re.match(r"torch_(\d+)_", name)
        if torchs is None:
            return name.removeprefix("sem.").startswith((self.mark, "dpex"))
        maker = int(torchs.group(1))
        return not is_alive(maker) or maker in self.members()

    def end(self) -> None:
        for pid in self.members():
            os.kill(pid, signal.SIGKILL)
        if self.process is not None:
            self.process.communicate(timeout=60)


def names_in_shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}


@pytest.fixture
def family(tmp_path: Path) -> Iterator[Family]:
    made = Family(tmp_path)
    yield made
    made.end()


LEAVES = {
    "torch's": "open(f'/dev/shm/torch_{os.getpid()}_1234_0', 'x')",
    "a semaphore": "lock = multiprocessing.get_context('spawn').Lock()",
    "a block": "block = shared_memory.SharedMemory(create=True, size=99)",
}


@pytest.mark.parametrize("what", LEAVES)
def test_what_is_left_in_shared_memory_is_seen(family: Family, what: str) -> None:
    """Ended so that nothing tidies up, neither this process nor the one that Python has for it."""
    body = f"{LEAVES[what]}\n[p.kill() for p in descendants()]\nos.kill(os.getpid(), 9)"
    assert family.run(body)[0] == -signal.SIGKILL
    left = family.shared_files()
    assert len(left) == 1
    assert not Family(family.folder).shared_files()
    Path("/dev/shm", *left).unlink()
    family.assert_nothing_is_left()


ENDS = {
    "normal": "assert len(list(loader(60))) == 30",
    "two epochs": "data = loader(60)\nfor _ in range(2): assert len(list(data)) == 30\ndel data",
    "worker seeding and persistent": "data = loader(60, persistent_workers=True)\nlist(data); list(data); del data",
    "break": "for batch in loader(): break\ndel batch",
    "delete the iterator": "data = loader(); it = iter(data); batch = next(it); del it, batch",
    "delete while forking": "data = loader(); it = iter(data); del it",
    "delete the loader": "data = loader(persistent_workers=True); it = iter(data); next(it); del data, it",
    "close": "data = loader(); it = iter(data); next(it); data.close(); data.close()",
    "context manager": "with loader() as data: next(iter(data))",
    "resized": "data = loader(seeding='batch'); it = iter(data); next(it); data.resize(local=4); next(it); del it",
    "tuned": "data = loader(600, num_workers='auto'); assert len(list(data)) == 300; it = iter(data); next(it); del it",
    "tuned, only the iterator": "it = iter(loader(num_workers='auto')); next(it); del it",
    "threads": "assert len(list(in_threads(200))) == 100",
    "threads, delete the iterator": "it = iter(in_threads(2_000)); [next(it) for _ in range(50)]; del it",
    "threads, resized": "data = in_threads(); it = iter(data); next(it); data.resize(local=9); next(it); del it",
    "exception": """
try:
    for batch in loader():
        raise ValueError("of the training loop")
except ValueError:
    pass
""",
    "exception in a function": """
def train():
    data = loader()
    for batch in data:
        raise ValueError("of the training loop")
try:
    train()
except ValueError as error:
    del error
""",
}


def test_nothing_is_left_while_the_process_lives_on(family: Family) -> None:
    """All ways in one process: each must leave it as it was before the next begins."""
    cases = "".join(
        f"def case():\n{textwrap.indent(body.strip(), '    ')}\ncase()\ngc.collect()\n"
        f"print({how!r}, end=': ')\nreport_leftovers(THREADS)\n"
        for how, body in ENDS.items()
    )
    code, out, err = family.run(cases)
    assert (code, out.splitlines(), err) == (0, [f"{how}: {NOTHING}" for how in ENDS], "")
    family.assert_nothing_is_left()


SLOW_STEP = "wait_as_work(0.02)"
"""A training step that takes so long that what a loop does meanwhile is asked of the kernel."""
LATE = {
    "iterator still alive": "it = iter(loader()); next(it)",
    "persistent": "data = loader(persistent_workers=True); next(iter(data))",
    "loader in a cycle": "data = loader(); it = iter(data); data.own = [data, it]; next(it)",
    "threads": "it = iter(in_threads(2_000)); [next(it) for _ in range(50)]",
    "sys.exit": "it = iter(loader()); next(it); sys.exit(0)",
    "batches kept": "kept = list(loader(60))",
    "tuned": "data = loader(2_000, num_workers='auto'); it = iter(data); [next(it) for _ in range(500)]",
    "tuned, in a cycle": "data = loader(num_workers='auto'); it = iter(data); data.own = [data, it]; next(it)",
    "persistent, slow steps": f"data = loader(60, persistent_workers=True)\nfor _ in data: {SLOW_STEP}",
    "iterator still alive, slow steps": f"it = iter(loader())\nfor _ in range(5): next(it); {SLOW_STEP}",
    "in-process, counted": "data = loader(num_workers=0); it = iter(data); data.diagnose(); next(it)"
    f"; {SLOW_STEP}; next(it)",
}


@pytest.mark.parametrize("how", LATE)
def test_nothing_is_left_when_the_interpreter_ends(family: Family, how: str) -> None:
    assert family.run(LATE[how]) == (0, "", "")
    family.assert_nothing_is_left()


def test_an_uncaught_exception_shows_only_itself(family: Family) -> None:
    code, _, err = family.run("for batch in loader():\n    raise ValueError('of the training loop')\n")
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: of the training loop\n")
    family.assert_nothing_is_left()


def test_os_exit_leaves_nothing(family: Family) -> None:
    assert family.run("it = iter(loader()); next(it); os._exit(4)") == (4, "", "")
    family.assert_nothing_is_left()


ENDLESS = {
    "map-style": "data = loader(2_000_000, seeding='batch')",
    "fixed workers": "data = loader(2_000_000)",
    "persistent": "data = loader(2_000_000, persistent_workers=True)",
    "resized": "data = loader(2_000_000, seeding='batch'); data.resize(local=3)",
    "tuned": "data = loader(2_000_000, num_workers='auto')",
    "threads": "data = in_threads(2_000_000)",
}
TRAINING = """
for number, batch in enumerate(data):
    if number == 10:
        say_ready()
"""


@pytest.mark.parametrize("what", ENDLESS)
def test_ctrl_c_shows_the_trainers_own_traceback_and_no_other(family: Family, what: str) -> None:
    """A terminal sends SIGINT to the whole group: trainer, prepared process and workers."""
    trainer = family.start_until_ready(ENDLESS[what] + TRAINING)
    os.killpg(trainer.pid, signal.SIGINT)
    _, err = trainer.communicate(timeout=ENDS_WITHIN_S)
    assert trainer.returncode == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    family.assert_nothing_is_left()


def test_ctrl_c_caught_by_the_trainer_leaves_it_able_to_go_on(family: Family) -> None:
    body = """
data = loader(2_000_000)
try:
    for number, batch in enumerate(data):
        if number == 10:
            say_ready()
except KeyboardInterrupt:
    print("interrupted", len(list(loader(20))), flush=True)
gc.collect()
report_leftovers(THREADS)
"""
    trainer = family.start_until_ready(body)
    os.killpg(trainer.pid, signal.SIGINT)
    out, err = trainer.communicate(timeout=ENDS_WITHIN_S)
    assert (trainer.returncode, out.splitlines(), err) == (0, ["interrupted 10", NOTHING], "")
    family.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP, signal.SIGABRT])
@pytest.mark.parametrize("what", ["map-style", "fixed workers", "threads"])
def test_killing_the_trainer_ends_its_workers(family: Family, number: signal.Signals, what: str) -> None:
    trainer = family.start_until_ready(ENDLESS[what] + TRAINING)
    trainer.send_signal(number)
    _, err = trainer.communicate(timeout=ENDS_WITHIN_S)
    assert trainer.returncode == -number
    assert err == ""
    family.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killing_a_trainer_whose_workers_are_busy_or_asleep(family: Family, number: signal.Signals) -> None:
    """One sample takes forever, so that no worker reads its socket."""
    body = """
class Slow(Augmented):
    def __getitem__(self, index):
        if index > 3:
            threading.Event().wait()
        return super().__getitem__(index)

it = iter(DpexDataLoader(Slow(100), num_workers=2))
next(it)
say_ready()
list(it)
"""
    trainer = family.start_until_ready(body)
    trainer.send_signal(number)
    trainer.communicate(timeout=ENDS_WITHIN_S)
    family.assert_nothing_is_left()


GROWTH = """
import psutil
me = psutil.Process()

class Tiny(Augmented):
    def __getitem__(self, index):
        return torch.tensor([index, index])

def held():
    gc.collect()
    return me.num_fds(), me.memory_info().rss

def flat(before, after, what):
    fds, more = after[0] - before[0], (after[1] - before[1]) / 2**20
    print(f"{what}: {fds} more descriptors, {more:.1f} MB more")
    assert fds <= 2, f"{what}: {fds} more descriptors"
    assert more < 12, f"{what}: {more:.1f} MB more"

def many_batches(count, extra):
    data = DpexDataLoader(Tiny(count), batch_size=2, num_workers=2, **extra)
    for number, _ in enumerate(data):
        if number == count // 10:
            before = held()
        if number == count // 2 - 200:
            flat(before, held(), f"batches {extra}")

def many_epochs(count):
    data = DpexDataLoader(Augmented(40, extra=700), batch_size=4, num_workers=2)
    for epoch in range(count):
        assert len(list(data)) == 10
        if epoch == count // 5:
            before = held()
    flat(before, held(), "epochs")
"""


def grown(batches: int, epochs: int) -> str:
    each = "".join(f"many_batches({2 * batches}, {extra})\n" for extra in ({}, {"seeding": "batch"}))
    return f"{GROWTH}\n{each}many_epochs({epochs})\nreport_leftovers(THREADS)\n"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_descriptors_and_memory_stay_flat(family: Family) -> None:
    process = family.start(grown(batches=100_000, epochs=50))
    out, err = process.communicate(timeout=580)
    assert (process.returncode, err) == (0, "")
    assert out.splitlines()[-1] == NOTHING


def runs_ahead(engine: Any) -> int:
    """How many batches are there that nobody asked for, with those that have just arrived."""
    engine._supply.collect()
    return int(engine.schedule.ready)


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_epochs_that_are_broken_off_give_their_memory_back(seeding: Any) -> None:
    """Batches that were made and never asked for, also those behind one that was not made yet."""
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    with DpexDataLoader(Augmented(64, 0.002, extra=20_000), seeding=seeding, **options) as loader:
        for _ in range(20):
            iterator = iter(loader)
            next(iterator)
            until(partial(runs_ahead, iterator._engine))
        pool = iterator._engine.pool("local")
        for _ in loader:
            pass
        del _
        gc.collect()
        flags = [bytes(s.flags[1::2]) for worker in pool._workers.values() for s in worker.segments.values()]
        assert flags
        assert not any(map(any, flags))
