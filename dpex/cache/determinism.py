"""Find out if preparing a sample is random, by preparing it twice, under different seeds of all known generators."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from dpex.cache.encoding import is_same
from dpex.profile.call_timer import StepWatch
from dpex.profile.live_timer import watch_of
from dpex.worker.batch_seeding import call_seeded
from dpex.worker.draws import GeneratorDraws, global_marks
from dpex.worker.own_generators import OwnGenerators
from dpex.worker.states import KeptStates

SEEDS = (0x1234_5678_5EED_0001, 0x2345_6789_5EED_0002)


def prepared_twice(prepare: Callable[[], Any], prepared_by: Any) -> tuple[Any, bool]:
    """Prepare a sample under two seeds. Return the first result, and True if it is random.

    It is random if the results differ in any bit, or if a generator was drawn from: a global one, or one that lies in
    ``prepared_by``. All generators are afterwards as they were.
    """
    own = OwnGenerators(prepared_by, None)
    kept, states = KeptStates(own), own.states()
    try:
        (first, drew), (second, drew_again) = (_under(seed, prepare) for seed in SEEDS)
        drew_own = not is_same(own.states(), states)
    finally:
        kept.put_back()
    return first, drew or drew_again or drew_own or not is_same(first, second)


def watched(dataset: Any, index: int) -> StepWatch | None:
    """Prepare a sample and return the watch that has seen which steps draw; None if the dataset cannot be watched.

    All generators are afterwards as they were.
    """

    def prepare(_: None) -> StepWatch | None:
        watch = watch_of(dataset, time.thread_time, GeneratorDraws)
        if watch is None or not watch.start():
            return None
        try:
            dataset[index]
        finally:
            watch.stop()
        return watch

    return call_seeded(SEEDS[0], prepare, None, OwnGenerators(dataset, None))


def _under(seed: int, prepare: Callable[[], Any]) -> tuple[Any, bool]:
    def prepared(_: None) -> tuple[Any, bool]:
        before = global_marks()
        return prepare(), global_marks() != before

    return call_seeded(seed, prepared, None)
