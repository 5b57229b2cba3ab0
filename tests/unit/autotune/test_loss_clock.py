"""By which clock a window is judged, and what of the training loop's wait the GPU feels."""

from dataclasses import replace

import pytest

from dpex.autotune.constants import NVML_SETTLES_S
from dpex.autotune.law.evidence import WorkEstimate
from dpex.autotune.supervisor import LossClock, by_events
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings
from dpex.measure.views import step_times

NOW = Settings(local=2, prefetch=4)
WINDOW = Reading(
    at=1.0, seconds=1.0, settings=NOW, later_batches=10, blocked_s=0.6, next_busy_s=0.1, stepping_s=0.3, straggler_s=0.2
)


def consumer(window: Reading) -> tuple[float, float, float, float]:
    return window.blocked_s, window.next_busy_s, window.stepping_s, window.straggler_s


def test_without_a_gpu_a_window_is_what_the_training_loop_saw() -> None:
    assert LossClock().of(WINDOW) == WINDOW


@pytest.mark.parametrize(
    ("stall_s", "step_s", "felt"),
    [
        (0.0, 1.0, (0.0, 0.0, 1.0, 0.0)),  # the GPU had work all the time
        (0.7, 0.3, (0.6, 0.1, 0.3, 0.2)),  # a loop that synchronises: its wait is the GPU's
        (0.05, 0.95, (0.0, 0.05, 0.95, 0.0)),  # the end of a stay, where the batch is handed out
        (0.4, 0.6, (0.3, 0.1, 0.6, 0.2)),
        (0.2, 0.3, (0.3, 0.1, 0.6, 0.2)),  # marks of half of the window were read
    ],
)
def test_by_events_the_gpu_loses_what_its_stream_waited(stall_s: float, step_s: float, felt: tuple[float, ...]) -> None:
    window = replace(WINDOW, gpu_running_stall_s=stall_s, gpu_steps=10, gpu_steps_s=step_s)
    found = LossClock().of(window)
    assert found == replace(by_events(window), signal="events")
    assert consumer(found) == pytest.approx(felt)


def test_waiting_for_copies_is_a_part_of_the_step() -> None:
    """Which the loop does not notice, and no worker shortens."""
    window = replace(
        WINDOW, blocked_s=0.0, next_busy_s=0.0, stepping_s=1.0, gpu_running_stall_s=0.0, gpu_steps=10, gpu_steps_s=0.4
    )
    assert consumer(by_events(replace(window, feed_wait_s=0.6))) == (0.0, 0.0, 1.0, 0.0)


def test_marks_the_stream_has_not_reached_mean_it_has_work() -> None:
    assert consumer(by_events(replace(WINDOW, gpu_running_stall_s=0.0))) == (0.0, 0.0, 1.0, 0.0)


def test_nobody_knows_what_the_gpu_does_while_no_batch_comes() -> None:
    stuck = replace(WINDOW, later_batches=0, blocked_s=1.0, next_busy_s=0.0, stepping_s=0.0, gpu_running_stall_s=0.0)
    assert by_events(stuck) == stuck


def test_a_window_without_a_batch_leaves_the_step_as_it_is() -> None:
    """Windows by CUDA events have no count of ended steps. One such count would divide the steps of all windows."""
    work, clock = WorkEstimate(), LossClock()
    for count in (2, 2, 0, 2, 2):
        seconds = 0.4 * count or 0.02
        window = replace(
            WINDOW,
            later_batches=count,
            next_busy_s=0.0,
            stepping_s=seconds,
            step_count=count or 1,
            stepped_s=seconds,
            gpu_running_stall_s=1.0 - 0.4 * count,
            gpu_steps=count,
            gpu_steps_s=0.4 * count,
        )
        found = clock.of(window)
        assert found is not None
        work.add(found)
    step = step_times(work.sum)
    assert (step.steps, step.net_s / step.steps) == (8, pytest.approx(0.4))


@pytest.mark.parametrize(("busy", "lost"), [(0.0, 0.7), (0.3, 0.7), (0.6, 0.4), (1.0, 0.0)])
def test_by_nvml_no_more_is_lost_than_the_gpu_idles(busy: float, lost: float) -> None:
    felt, window = LossClock(), replace(WINDOW, kernel_s=busy, kernel_seen_s=1.0)
    seen = [felt.of(window) for _ in range(2 + int(NVML_SETTLES_S))]
    assert [found is not None for found in seen] == [False, False, True, True]
    last = seen[-1]
    assert last is not None
    assert last.blocked_s + last.next_busy_s == pytest.approx(lost)
    assert (last.stepping_s, last.signal) == (pytest.approx(1.0 - lost), "nvml")


def test_after_a_change_nvml_tells_nothing_for_a_while() -> None:
    felt, window = (
        LossClock(),
        replace(WINDOW, kernel_s=0.5 * NVML_SETTLES_S, kernel_seen_s=NVML_SETTLES_S, seconds=NVML_SETTLES_S),
    )
    known = [felt.of(window) for _ in range(2)]
    known.append(felt.of(replace(window, settings=replace(NOW, local=3))))
    assert [found is not None for found in known] == [False, True, False]
