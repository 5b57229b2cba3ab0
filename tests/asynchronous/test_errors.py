"""Asynchronous datasets: a misuse of the event loop costs its own batch only."""

import asyncio
import errno
import os
from typing import Any

import pytest

from dpex import AsyncError, DpexDataLoader, SamplePolicy
from tests.asynchronous.test_samples import IN, Wrapper
from tests.asynchronous.works import Indices, indices

pytestmark = [pytest.mark.filterwarnings("ignore:coroutine .* was never awaited:RuntimeWarning")]


class Misuses(Indices):
    """Sample 9 does what ``misuse`` does."""

    async def misuse(self) -> Any:
        raise NotImplementedError

    async def __getitem__(self, index: int) -> Any:
        if index == 9:
            await self.misuse()
        return await super().__getitem__(index)


class AwaitsOthersFuture(Misuses):
    def __init__(self) -> None:
        super().__init__(24)
        self.future = asyncio.new_event_loop().create_future()

    async def misuse(self) -> Any:
        await self.future


class RunsLoop(Misuses):
    """Runs a coroutine, and does not await it."""

    def __init__(self) -> None:
        super().__init__(24)

    async def misuse(self) -> Any:
        coroutine = Indices()[0]
        try:
            asyncio.run(coroutine)
        finally:
            coroutine.close()


class OpensFiles(Misuses):
    def __init__(self) -> None:
        super().__init__(24)

    async def misuse(self) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "socket")


MISUSES = {
    AwaitsOthersFuture: "attached to a different loop",
    RunsLoop: "cannot be called from a running event loop",
    OpensFiles: "Too many open files",
}
"""The errors of Python, which `docs/how-to/async.md` explains."""


@IN
@pytest.mark.parametrize("kind", MISUSES)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_misuse_is_named_and_the_other_batches_come(kind: type[Misuses], options: dict[str, Any]) -> None:
    with DpexDataLoader(kind(), batch_size=8, collate_fn=list, **options) as loader:
        batches = iter(loader)
        assert next(batches) == list(range(8))
        with pytest.raises((RuntimeError, OSError), match=MISUSES[kind]):
            next(batches)
        assert next(batches) == list(range(16, 24))


@pytest.mark.parametrize("kind", MISUSES)
def test_a_policy_fills_the_place_of_a_misuse(kind: type[Misuses]) -> None:
    with pytest.warns(RuntimeWarning, match=r"sample 9 .*"):
        found = indices(kind(), num_workers=1, sample_policy=SamplePolicy(on_error="skip"))
    assert found == [*range(9), 10, *range(10, 24)]


class AddsOne(Wrapper):
    def __getitem__(self, index: int) -> Any:
        return 1 + self.base[index]


@IN
def test_a_synchronous_wrapper_of_coroutines_is_named(options: dict[str, Any]) -> None:
    with pytest.raises(
        AsyncError, match=r"Indices.__getitem__ is async: that of AddsOne, which wraps it, must be, too"
    ):
        indices(AddsOne(Indices()), **options)
