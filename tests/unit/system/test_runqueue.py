"""Waiting for a CPU, as the kernel tells of it by thread."""

import os
import shutil
import threading
from pathlib import Path

import pytest

from dpex.measure.pool_reading import PoolReading
from dpex.system import meter
from dpex.system.meter import RunQueueTimes, with_queue


def kernel_says(proc: Path, pid: str, **ran: tuple[float, float]) -> None:
    """CPU and run queue seconds by thread."""
    for thread, (cpu_s, queued_s) in ran.items():
        task = proc / pid / "task" / thread.removeprefix("t")
        task.mkdir(parents=True, exist_ok=True)
        (task / "schedstat").write_text(f"{cpu_s * 1e9:.0f} {queued_s * 1e9:.0f} 7\n")


def test_queueing_for_a_cpu_is_read_by_thread(tmp_path: Path) -> None:
    pids = list(range(100, 132))
    for pid in pids:
        kernel_says(tmp_path, str(pid), t1=(1, 1), t2=(0, 0), t3=(9, 9))
    kernel_says(tmp_path, "self", t8=(1, 0), t9=(4, 4))
    then = meter.read_queue_times(pids, 9, tmp_path)
    assert len(then.by_pid) == 16
    for pid in pids:
        kernel_says(tmp_path, str(pid), t1=(2, 3), t2=(1, 1), t4=(0.5, 0.25))
        shutil.rmtree(tmp_path / str(pid) / "task" / "3")
    kernel_says(tmp_path, "self", t8=(4, 5), t9=(5, 7))
    workers, here, trainer = meter.read_queue_times(pids, 9, tmp_path).since(then)
    assert workers == (16 * 2.5, 16 * 3.25)
    assert workers is not None
    assert workers.delay == 1.3
    assert here == (4, 8)
    assert trainer == (1, 3)
    assert meter.read_queue_times([999], 7, tmp_path).since(then) == (None, (4, 8), None)
    assert meter.read_queue_times([999], 8, tmp_path / "none").since(then) == (None, None, None)


def test_workers_that_began_in_between_are_known(tmp_path: Path) -> None:
    """Else the first window would take all their queueing for waiting."""
    kernel_says(tmp_path, "7", t7=(0.5, 4.0))
    began = meter.read_queue_times([7], 0, tmp_path).since(meter.QueueTimes())
    assert began.workers is not None
    assert began.workers.delay == 8.0


def test_queueing_is_that_of_the_batches_whose_results_came() -> None:
    """In a short window results come of batches that began before it, and what these queued then is not seen in it."""
    made = PoolReading(running=2, tickets=4, load_s=2.0, load_cpu_s=0.8)
    assert with_queue(made, RunQueueTimes(0.04, 0.06)).queued_s == pytest.approx(1.2)
    assert with_queue(made, RunQueueTimes(0.04, 0.06)).queue_known_s == made.busy_s
    assert with_queue(made, None).queue_known_s == 0.0


def test_a_thread_asks_for_its_own_time_on_run_queues(tmp_path: Path) -> None:
    file = tmp_path / "schedstat"
    assert meter.own_queue_s(str(file)) is None
    file.write_text("")
    assert meter.own_queue_s(str(file)) is None
    file.write_text("5000000000 2500000000 9\n")
    assert meter.own_queue_s(str(file)) == 2.5


def test_queueing_here_is_known_where_the_kernel_counts_it() -> None:
    if not Path("/proc/self/schedstat").exists():
        pytest.skip("this kernel does not count it")
    seen = meter.read_queue_times([os.getpid()], threading.get_native_id())
    assert seen.trainer is not None
    assert seen.workers is not None
    assert seen.workers.queued_s >= seen.trainer.queued_s > 0
    assert (meter.own_queue_s() or 0.0) >= seen.trainer.queued_s
