"""However a training script ends, nothing of dpex stays: no process, no shared memory, no thread, no message."""

import gc
import os
import signal
import textwrap
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from families import Augmented
from inspection import collect, segments_of
from programs import ran
from trainers import NOTHING, Forker, family, forker
from waiting import until

from dpex import DpexDataLoader
from dpex.engine.engine import GRACE_AT_EXIT_S

__all__ = ["family", "forker"]


def test_what_is_left_in_shared_memory_is_seen(family: Forker) -> None:
    """Ended so that nothing tidies up, neither this process nor the one that Python has for it."""
    body = "block = shared_memory.SharedMemory(create=True, size=99)\n[p.kill() for p in descendants()]"
    assert family.run(f"{body}\nos.kill(os.getpid(), 9)")[0] == -signal.SIGKILL
    (left,) = family.shared_files()
    Path("/dev/shm", left).unlink()
    family.assert_nothing_is_left()


PRETEND = """
import pytest
from accelerator import pretended
accelerator = next(made := pretended(pytest.MonkeyPatch()))
"""
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
    "pinned": f"{PRETEND}assert len(list(loader(60, pin_memory=True))) == 30",
    "pinned, break": "for batch in loader(pin_memory=True): break\ndel batch",
    "pinned, close": "data = loader(pin_memory=True); it = iter(data); next(it); data.close(); data.close()",
    "pinned, persistent": "data = loader(60, pin_memory=True, persistent_workers=True)\n"
    "list(data); next(iter(data)); del data",
    "pinned, with a sampler that fails": """
try:
    next(iter(loader(pin_memory=True, sampler=(1 / 0 for _ in "1"))))
except ZeroDivisionError:
    pass
""",
}


def test_nothing_is_left_while_the_process_lives_on(family: Forker) -> None:
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
PINNED = f"""{PRETEND}
accelerator.before = lambda batch: sum(range(100_000))
data = loader(pin_memory=True)
it = iter(data)
next(it)
"""
LATE = {
    "iterator still alive": "it = iter(loader()); next(it)",
    "persistent": "data = loader(persistent_workers=True); next(iter(data))",
    "loader in a cycle": "data = loader(); it = iter(data); data.own = [data, it]; next(it)",
    "sys.exit": "it = iter(loader()); next(it); sys.exit(0)",
    "batches kept": "kept = list(loader(60))",
    "tuned": "data = loader(2_000, num_workers='auto'); it = iter(data); [next(it) for _ in range(500)]",
    "tuned, in a cycle": "data = loader(num_workers='auto'); it = iter(data); data.own = [data, it]; next(it)",
    "persistent, slow steps": f"data = loader(60, persistent_workers=True)\nfor _ in data: {SLOW_STEP}",
    "iterator still alive, slow steps": f"it = iter(loader())\nfor _ in range(5): next(it); {SLOW_STEP}",
    "spawned, SIGTERM handled": "signal.signal(signal.SIGTERM, print)\n"
    "it = iter(loader(multiprocessing_context='spawn')); next(it)",
    "spawned, starting": "it = iter(loader(multiprocessing_context='spawn'))",
    "in-process, counted": "data = loader(num_workers=0); it = iter(data); data.diagnose(); next(it)"
    f"; {SLOW_STEP}; next(it)",
    "pinned": PINNED,
    "pinned, in a cycle": f"{PINNED}data.own = [data, it]",
}


SIMILAR = {"iterator still alive, slow steps", "batches kept", "tuned, in a cycle", "pinned, in a cycle", "resized"}
"""Cases in which one part differs from a case of the short tier."""


def short_and_long(cases: Iterable[str]) -> list[Any]:
    """Mark `SIMILAR` cases as tests of the long tier."""
    return [pytest.param(case, marks=[pytest.mark.long] * (case in SIMILAR)) for case in cases]


@pytest.mark.parametrize("how", short_and_long(LATE))
def test_nothing_is_left_when_the_interpreter_ends(family: Forker, how: str) -> None:
    assert family.run(LATE[how]) == (0, "", "")
    family.assert_nothing_is_left()


def test_an_uncaught_exception_shows_only_itself(family: Forker) -> None:
    code, _, err = family.run("for batch in loader():\n    raise ValueError('of the training loop')\n")
    assert code == 1
    assert err.count("Traceback") == 1
    assert err.endswith("ValueError: of the training loop\n")
    family.assert_nothing_is_left()


def test_os_exit_leaves_nothing(family: Forker) -> None:
    assert family.run("it = iter(loader()); next(it); os._exit(4)") == (4, "", "")
    family.assert_nothing_is_left()


ENDLESS = {
    "map-style": "data = loader(2_000_000, seeding='batch')",
    "fixed workers": "data = loader(2_000_000)",
    "persistent": "data = loader(2_000_000, persistent_workers=True)",
    "resized": "data = loader(2_000_000, seeding='batch'); data.resize(local=3)",
    "tuned": "data = loader(2_000_000, num_workers='auto')",
    "spawned": "data = loader(2_000_000, multiprocessing_context='spawn')",
}
TRAINING = """
for number, batch in enumerate(data):
    if number == 10:
        say_ready()
"""


@pytest.mark.parametrize("what", short_and_long(ENDLESS))
def test_ctrl_c_shows_the_trainers_own_traceback_and_no_other(family: Forker, what: str) -> None:
    """A terminal sends SIGINT to the whole group: trainer, prepared process and workers."""
    trainer = family.start_until_ready(ENDLESS[what] + TRAINING)
    os.killpg(trainer.pid, signal.SIGINT)
    code, _, err = trainer.end()
    assert code == -signal.SIGINT
    assert err.count("Traceback") == 1
    assert err.rstrip().endswith("KeyboardInterrupt")
    family.assert_nothing_is_left()


def test_ctrl_c_caught_by_the_trainer_leaves_it_able_to_go_on(family: Forker) -> None:
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
    code, out, err = trainer.end()
    assert (code, out.splitlines(), err) == (0, ["ready", "interrupted 10", NOTHING], "")
    family.assert_nothing_is_left()


@pytest.mark.parametrize(
    ("what", "number"),
    [
        ("map-style", signal.SIGTERM),
        ("fixed workers", signal.SIGHUP),
        ("map-style", signal.SIGKILL),
        ("spawned", signal.SIGKILL),
    ],
)
def test_killing_the_trainer_ends_its_workers(family: Forker, number: signal.Signals, what: str) -> None:
    trainer = family.start_until_ready(ENDLESS[what] + TRAINING)
    os.kill(trainer.pid, number)
    assert trainer.end() == (-number, "ready\n", "")
    family.assert_nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_killing_a_trainer_whose_workers_are_busy_or_asleep(family: Forker, number: signal.Signals) -> None:
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
    os.kill(trainer.pid, number)
    trainer.end()
    family.assert_nothing_is_left()


@pytest.mark.parametrize("seeding", ["worker", "batch"])
def test_epochs_that_are_broken_off_give_their_memory_back(seeding: Any) -> None:
    """Batches that were made and never asked for, also those behind one that was not made yet."""
    options = {"batch_size": 4, "num_workers": 2, "persistent_workers": True, "prefetch_factor": 4}
    with DpexDataLoader(Augmented(64, 0.002, extra=20_000), seeding=seeding, **options) as loader:
        for _ in range(20):
            iterator = iter(loader)
            next(iterator)
            until(partial(collect, iterator))
        for _ in loader:
            pass
        del _
        gc.collect()
        flags = [bytes(segment.flags[1::2]) for segment in segments_of(iterator)]
        assert flags
        assert not any(map(any, flags))


ENDS_IN_A_LONG_SAMPLE = """
import os, threading
from dpex import DpexDataLoader
from dpex.pools.local.pool import LocalPool

close = LocalPool.close

def told(self, grace_s):
    print(grace_s, flush=True)
    close(self, grace_s)

LocalPool.close = told

class Data:
    def __len__(self):
        return 4

    def __getitem__(self, index):
        if index:
            threading.Event().wait()
        return index

iterator = iter(DpexDataLoader(Data(), num_workers=2))
next(iterator)
threading.Thread(target=next, args=(iterator,), daemon=True).start()
"""


def test_a_program_that_ends_gives_its_workers_half_a_second() -> None:
    assert ran("-c", ENDS_IN_A_LONG_SAMPLE).stdout == f"{GRACE_AT_EXIT_S}\n"
