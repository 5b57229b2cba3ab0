"""Changes to the code that a test must notice: `python -m tests.mutants [part of a name ...]`.

Each mutant is one wrong line. It is put into a copy of the tree, where the test that is said to notice it must fail;
without the change all of these tests must pass. `tests/test_mutants.py` checks that each text is still in the code once
and each test still exists, so that the list cannot become outdated unseen.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
COPIED = ("dpex", "tests", "benchmarks", "pyproject.toml")
PASSED, FAILED = 0, 1
"""Exit codes of pytest; every other one says that the test was not run."""
TEST_S = 120.0
"""Longest time that a test may take; one that does not end has not noticed the mutant in any way that helps."""


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """``name``: what goes wrong; ``text`` of ``file`` is replaced by ``by``; ``test`` is the one that notices it."""

    name: str
    file: str
    text: str
    by: str
    test: str


ENGINE_STATE = "tests/core/test_engine_state.py"
LOCAL_POOL = "tests/test_local_pool.py"
LIMITS = "tests/autotune/test_limits.py"
MUTANTS = (
    Mutant(
        name="dispatch forgets tickets that a pool refused",
        file="dpex/core/dispatch.py",
        text="schedule.give_back(message.tickets)",
        by="pass",
        test=f"{ENGINE_STATE}::test_a_refused_message_takes_those_behind_it_back_and_they_are_sent_again_in_order",
    ),
    Mutant(
        name="the load of a pool never falls",
        file="dpex/core/dispatch.py",
        text="self.load[carrier] -= 1",
        by="self.load[carrier] -= 0",
        test=f"{ENGINE_STATE}::test_the_pool_with_the_least_on_its_way_by_worker_is_next",
    ),
    Mutant(
        name="the local pool tells of results of an older epoch",
        file="dpex/pools/local/pool.py",
        text="if epoch == self._epoch:",
        by="if epoch <= self._epoch:",
        test=f"{LOCAL_POOL}::test_results_of_an_earlier_epoch_are_not_told_of_and_give_their_slots_back",
    ),
    Mutant(
        name="the engine takes a result of an older epoch",
        file="dpex/core/engine_state.py",
        text="ticket = schedule.ticket(number) if event.epoch == self.epoch else None",
        by="ticket = schedule.ticket(number)",
        test=f"{ENGINE_STATE}::test_a_result_of_an_earlier_epoch_is_discarded",
    ),
    Mutant(
        name="a new epoch keeps what was not delivered",
        file="dpex/core/engine_state.py",
        text="        if unwanted:",
        by="        if False:",
        test="tests/unit/engine/test_engine::test_a_new_epoch_decodes_what_was_not_delivered_so_that_its_memory_returns",
    ),
    Mutant(
        name="a batch that was made twice is not decoded",
        file="dpex/core/engine_state.py",
        text="self.instructions.append(Discard((event.value,)))",
        by="pass",
        test="tests/unit/engine/test_engine::test_a_batch_that_was_made_twice_is_decoded_and_dropped",
    ),
    Mutant(
        name="a stream's end is forgotten",
        file="dpex/core/logical_log.py",
        text="            self.made(epoch, number, index)",
        by="            pass",
        test=f"{ENGINE_STATE}::test_what_a_stream_does_at_its_end_is_done_again_unless_its_state_after_that_is_known",
    ),
    Mutant(
        name="nothing is counted again after a death",
        file="dpex/pools/local/workers.py",
        text="self._suspicious or (doubtful and self._queue is not None)",
        by="self._suspicious",
        test=f"{LOCAL_POOL}::test_what_a_worker_took_and_did_not_write_down_before_it_died_is_found_by_counting_again",
    ),
    Mutant(
        name="a dead worker is said to have held tickets of older epochs",
        file="dpex/pools/local/workers.py",
        text="for (epoch, _), ticket in worker.held.items() if epoch == self._epoch]",
        by="for (epoch, _), ticket in worker.held.items()]",
        test=f"{LOCAL_POOL}::test_a_dead_worker_held_tickets_of_this_epoch_alone",
    ),
    Mutant(
        name="what a worker held of an older epoch is made again in this one",
        file="dpex/core/failures.py",
        text="if event.epoch == epoch else (0, [])",
        by="if event.epoch <= epoch else (0, [])",
        test=f"{ENGINE_STATE}::test_what_a_worker_held_of_an_earlier_epoch_is_nobodys_loss",
    ),
    Mutant(
        name="the tuner ignores memory_budget",
        file="dpex/autotune/limits.py",
        text="return max(1, min(most, int(budget / batch_bytes)))",
        by="return most",
        test=f"{LIMITS}::test_a_memory_budget_bounds_the_batches_in_flight",
    ),
    Mutant(
        name="the tuner is not told of memory_budget",
        file="dpex/autotune/runtime/tuner.py",
        text="batch_budget=budget",
        by="batch_budget=None",
        test="tests/test_tuner.py::test_a_budget_bounds_the_memory_that_the_controller_sees",
    ),
    Mutant(
        name="workers are not limited by memory",
        file="dpex/autotune/limits.py",
        text="return min(most, max(1, int((memory - batch_bytes) / each))) if fits else most",
        by="return most",
        test=f"{LIMITS}::test_memory_bounds_the_workers_of_this_machine",
    ),
    Mutant(
        name="batches that are given up count as made again",
        file="dpex/core/failures.py",
        text="return held - len(given_up), given_up",
        by="return held, given_up",
        test=f"{ENGINE_STATE}::"
        "test_a_ticket_that_was_with_three_workers_as_they_died_is_given_up_and_not_counted_as_made_again",
    ),
    Mutant(
        name="a death counts as one batch made again, whatever the worker held",
        file="dpex/core/failures.py",
        text="self.remade += again",
        by="self.remade += bool(again)",
        test=f"{ENGINE_STATE}::test_tickets_of_a_dead_worker_are_made_again_and_counted_one_by_one",
    ),
    Mutant(
        name="the error of a dead worker is not counted",
        file="dpex/engine/raised.py",
        text='errors["worker"] += 1',
        by="pass",
        test="tests/unit/engine/test_engine::test_a_batch_that_killed_its_workers_is_an_error_of_kind_worker",
    ),
    Mutant(
        name="an error of the dataset in a worker is not counted",
        file="dpex/engine/raised.py",
        text='errors["batch"] += 1',
        by="pass",
        test="tests/telemetry/test_endpoint.py::test_errors_of_the_dataset_and_deaths_are_counted",
    ),
    Mutant(
        name="a compressed buffer is taken before its checksum was seen",
        file="dpex/transport/compression.py",
        text="behind = stream.read(len(_END_BYTE) + 1)",
        by="behind = _END_BYTE",
        test="tests/unit/transport/test_compression::test_a_length_that_is_too_short_is_found",
    ),
    Mutant(
        name="memory is taken for compressed buffers that no batch has",
        file="dpex/pools/agent/frames.py",
        text="check(header, sizes)\n    buffers",
        by="pass\n    buffers",
        test="tests/agent/test_agent_link.py::test_no_memory_is_taken_for_more_than_a_batch_has",
    ),
    Mutant(
        name="a node that is cut off in the middle of a message is waited for",
        file="dpex/pools/agent/connection.py",
        text="(*_KEEPALIVE, _GIVE_UP) if is_trainer else _KEEPALIVE",
        by="_KEEPALIVE",
        test="tests/agent/test_network.py::test_a_node_that_is_cut_off_is_waited_for_and_given_up_if_that_lasts",
    ),
)


def copy_of_the_tree(root: Path, to: Path) -> None:
    """Copy what tests need."""
    for name in COPIED:
        if (root / name).is_dir():
            shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__", "results", "data"))
        elif (root / name).exists():
            shutil.copy(root / name, to / name)


def outcome(tests: Iterable[str], tree: Path) -> int:
    """The exit code of pytest for these tests, run in that tree; what it says is shown where they were not run."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    try:
        ran = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=TEST_S, check=False)
    except subprocess.TimeoutExpired:
        return -1
    if ran.returncode not in (PASSED, FAILED):
        print(ran.stdout[-2000:], ran.stderr[-2000:])
    return ran.returncode


def is_noticed(mutant: Mutant, root: Path) -> bool:
    """Whether its test fails where the change is made."""
    with TemporaryDirectory(prefix="dpex-mutant-") as directory:
        tree = Path(directory)
        copy_of_the_tree(root, tree)
        changed = tree / mutant.file
        changed.write_text(changed.read_text().replace(mutant.text, mutant.by))
        return outcome([mutant.test], tree) == FAILED


def main(wanted: Sequence[str], mutants: Sequence[Mutant] = MUTANTS, root: Path = ROOT) -> int:
    """Print a line for each; the exit code is 1 unless all are noticed, and by tests that pass without them."""
    chosen = [mutant for mutant in mutants if not wanted or any(part in mutant.name for part in wanted)]
    if not chosen or outcome(sorted({mutant.test for mutant in chosen}), root) != PASSED:
        print("the tests do not pass without any mutant" if chosen else "there is no such mutant")
        return 1
    survivors = 0
    for mutant in chosen:
        noticed = is_noticed(mutant, root)
        survivors += not noticed
        print(f"{'noticed ' if noticed else 'SURVIVES'}  {mutant.name}  ({mutant.test})", flush=True)
    return int(survivors > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
