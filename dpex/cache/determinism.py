"""Find out if preparing samples is random: by draws from known generators, and by preparing them again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, TypeVar

from dpex.cache.encoding import is_same
from dpex.profile.call_timer import StepWatch
from dpex.profile.live_timer import watch_of
from dpex.worker import sample_guard
from dpex.worker.batch_seeding import call_seeded
from dpex.worker.draws import GeneratorDraws, global_marks
from dpex.worker.own_generators import OwnGenerators

Result = TypeVar("Result")
SEEDS = (0x1234_5678_5EED_0001, 0x2345_6789_5EED_0002)
"""Seeds of all generators: while a random step is looked for, and while a sample is prepared again."""


def prepared(prepare: Callable[[], Result], prepared_by: Any = None) -> tuple[Result, float, bool]:
    """Prepare samples. Return them, the seconds that it took, and True if a generator was drawn from.

    It is a global generator, or one that lies in ``prepared_by``, if that is not None.
    """
    own = None if prepared_by is None else OwnGenerators(prepared_by, None)
    states, before = own and own.states(), global_marks()
    began = time.perf_counter()
    found = prepare()
    took_s = time.perf_counter() - began
    return found, took_s, global_marks() != before or bool(own and not is_same(own.states(), states))


def prepared_again(prepare: Callable[[], Result], prepared_by: Any) -> Result:
    """Prepare samples under another seed. All generators are afterwards as they were.

    The time counts against no limit of `dpex.SamplePolicy`.
    """
    if sample_guard.watch_of_process is not None:
        sample_guard.watch_of_process.begin_again()
    return call_seeded(SEEDS[1], lambda _: prepare(), None, OwnGenerators(prepared_by, None))


def watched(dataset: Any, index: int, *, in_bulk: bool = False) -> StepWatch | None:
    """Prepare a sample and return the watch that has seen which steps draw; None if the dataset cannot be watched.

    All generators are afterwards as they were.
    """

    def prepare(_: None) -> StepWatch | None:
        watch = watch_of(dataset, time.thread_time, GeneratorDraws)
        if watch is None or not watch.start():
            return None
        try:
            dataset.__getitems__([index]) if in_bulk else dataset[index]
        finally:
            watch.stop()
        return watch

    return call_seeded(SEEDS[0], prepare, None, OwnGenerators(dataset, None))
