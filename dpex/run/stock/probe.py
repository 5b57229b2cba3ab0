"""Times the transforms of a dataset after a run, in this process, alone and for a moment, by `dpex.profile.call_timer`.
What the dataset's code does besides giving samples, it does here once more.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

from dpex.diagnose.facts import TransformFacts
from dpex.errors import DpexError
from dpex.measure.batch_times import StepSums
from dpex.profile.call_timer import TimedStep
from dpex.profile.discover import label, watch_of
from dpex.profile.live_timer import COLLATE
from dpex.worker.current_batch import current

MOST_S = 5.0
"""A batch that was begun is finished."""
MOST_BATCHES = 64
"""Whatever comes first ends the probe, this or `MOST_S`."""
_SEED = 0
"""Of all batches, for a dataset that asks `dpex.batch_seed`."""


class ProbeError(DpexError):
    """The dataset could not be measured alone; the message says why."""


@current.seeded(_SEED)
def transforms_of(
    dataset: Any, collate_fn: Any, batch_size: int | None
) -> tuple[tuple[TransformFacts, ...], int, float]:
    """Steps within ``dataset[i]`` and the collate function, each without the steps within it; batches made for that,
    and seconds they took.

    Raises:
        ProbeError: it has no samples, or the dataset or the collate function raised.
    """
    began, batches = time.perf_counter(), 0
    found: dict[str, StepSums] = {}
    try:
        for batch in _indices(len(dataset), batch_size or 1):
            for step in _steps_of(dataset, collate_fn, batch, is_batch=batch_size is not None):
                name, more = " > ".join(step.path), StepSums(calls=step.calls, wall_s=step.wall_s, cpu_s=step.cpu_s)
                found[name] = found.get(name, StepSums()).plus(more)
            batches += 1
            if batches == MOST_BATCHES or time.perf_counter() - began > MOST_S:
                break
    except Exception as error:
        raise ProbeError(f"the dataset alone raised {type(error).__name__}: {error}") from error
    if not batches:
        raise ProbeError("the dataset has no samples")
    steps = tuple(sums.narrowed(TransformFacts, name=name) for name, sums in found.items())
    return steps, batches, time.perf_counter() - began


def _steps_of(dataset: Any, collate_fn: Any, indices: list[int], *, is_batch: bool) -> tuple[TimedStep, ...]:
    """Make one batch and return its steps."""
    watch = watch_of(dataset, time.thread_time)
    if watch is None:
        raise ProbeError("its attributes cannot be read")
    watch.start()
    try:
        samples = [watch.call(f"{label(dataset)}.__getitem__", dataset.__getitem__, index) for index in indices]
        watch.call(COLLATE, collate_fn, samples if is_batch else samples[0])
    finally:
        watch.stop()
    return watch.steps


def _indices(length: int, batch_size: int) -> Iterator[list[int]]:
    """Each sample once, all over the dataset."""
    order = random.Random(0).sample(range(length), min(length, MOST_BATCHES * batch_size))
    return (order[at : at + batch_size] for at in range(0, len(order), batch_size))
