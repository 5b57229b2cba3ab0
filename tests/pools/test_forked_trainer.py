"""A trainer that forks in its loop: the child cannot touch the parent's iterators, and makes its own."""

import gc
import threading
from collections.abc import Callable
from multiprocessing import util
from typing import Any

import forks
import pytest
import torch
from families import Augmented, assert_same, seeded, stacked
from inspection import engine_of, lock_of, template_pid

from dpex import DpexDataLoader, IteratorClosedError

ROWS = 120
KINDS: dict[str, dict[str, Any]] = {
    "worker": {"num_workers": 2},
    "batch": {"num_workers": 2, "seeding": "batch"},
    "auto": {"num_workers": "auto", "seeding": "batch"},
    "worker, persistent": {"num_workers": 2, "persistent_workers": True},
    "batch, persistent": {"num_workers": 2, "seeding": "batch", "persistent_workers": True},
}


def in_a_child(body: Callable[[], Any]) -> None:
    """Run ``body`` in a forked child that then ends as programs do."""

    def run() -> None:
        body()
        gc.collect()
        util._exit_function()  # type: ignore[attr-defined]  # what `multiprocessing` does as an interpreter ends

    forks.in_a_child(run)


def loader_of(kind: str) -> DpexDataLoader[Any]:
    return DpexDataLoader(Augmented(ROWS, nap_s=0.001), batch_size=4, generator=seeded(), **KINDS[kind])


def undisturbed(kind: str) -> torch.Tensor:
    return stacked(loader_of(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_childs_use_of_its_parents_iterator_fails_harmlessly(kind: str) -> None:
    wanted = undisturbed(kind)
    loader = loader_of(kind)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(5)]
    template = template_pid(iterator)

    def use() -> None:
        for _ in range(3):
            with pytest.raises(IteratorClosedError, match=r"forked.*iter\(loader\).*new DpexDataLoader"):
                next(iterator)
        loader.resize(prefetch=3)
        engine_of(iterator).resize(engine_of(iterator).state.placement.settings)
        loader.stats()
        loader.close()

    in_a_child(use)
    batches += [next(iterator) for _ in range(5)]
    in_a_child(lambda: None)
    batches += list(iterator)
    assert_same(torch.cat(batches), wanted)
    assert engine_of(iterator).closed or template_pid(iterator) == template


@pytest.mark.parametrize("kind", KINDS)
def test_iter_in_a_child_makes_its_own_iterator_or_fails(kind: str) -> None:
    loader = loader_of(kind)
    iterator = iter(loader)
    batches = [next(iterator) for _ in range(5)]

    def iterate() -> None:
        if loader.persistent_workers:
            with pytest.raises(IteratorClosedError, match="new DpexDataLoader"):
                iter(loader)
        own = loader_of(kind) if loader.persistent_workers else loader
        assert stacked(own)[:, 0].tolist() == list(range(ROWS))

    in_a_child(iterate)
    batches += list(iterator)
    assert torch.cat(batches)[:, 0].tolist() == list(range(ROWS))


def test_a_lock_held_at_the_fork_does_not_block_the_child() -> None:
    """Another thread may hold the engine's lock just then; in the child nobody would ever release it."""
    iterator = iter(loader_of("batch"))
    next(iterator)

    def use() -> None:
        with pytest.raises(IteratorClosedError):
            next(iterator)

    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with lock_of(iterator):
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    try:
        in_a_child(use)
    finally:
        done.set()
        thread.join()
    assert len(list(iterator)) == ROWS // 4 - 1
