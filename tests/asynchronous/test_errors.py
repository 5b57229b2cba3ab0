"""Asynchronous datasets: a misuse of the event loop is named with its remedy, and costs its own batch only."""

import asyncio
import errno
import os
from typing import Any

import pytest

from dpex import AsyncDataset, DpexDataLoader, SamplePolicy, UsageError
from tests.asynchronous.test_samples import IN, Split, Wrapper
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


class HasSession(Misuses):
    """Its session was made in the training process, whose event loop has ended or, with ``ends=False``, is open."""

    def __init__(self, *, ends: bool = True) -> None:
        super().__init__(24)
        self.loop = asyncio.new_event_loop()
        self.session = self.loop.run_until_complete(self._made())
        if ends:
            self.loop.close()

    async def _made(self) -> Any:
        return pytest.importorskip("aiohttp").ClientSession()

    async def misuse(self) -> Any:
        await self.session.get("http://127.0.0.1:9")


class HasOpenSession(HasSession):
    def __init__(self) -> None:
        super().__init__(ends=False)


class RunsLoop(Misuses):
    """Runs a coroutine as ``run`` does, and not by awaiting it."""

    def __init__(self) -> None:
        super().__init__(24)

    def run(self, coroutine: Any) -> None:
        asyncio.run(coroutine)

    async def misuse(self) -> Any:
        coroutine = Indices()[0]
        try:
            self.run(coroutine)
        finally:
            coroutine.close()


class RunsOtherLoop(RunsLoop):
    def run(self, coroutine: Any) -> None:
        asyncio.new_event_loop().run_until_complete(coroutine)


class RunsThisLoop(RunsLoop):
    def run(self, coroutine: Any) -> None:
        asyncio.get_running_loop().run_until_complete(coroutine)


class OpensFiles(RunsLoop):
    async def misuse(self) -> Any:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), "socket")


OTHER_LOOP = "used a client, lock or task of another event loop .*: make such objects in the first call that awaits"
NESTED = r"started an event loop inside the loop that loads its samples .* await asyncio.to_thread\(function\)"
FILES = "too many open files while sample 9 of OpensFiles was loaded, one of up to 64 .* Use one client per process"
MISUSES = {
    AwaitsOthersFuture: OTHER_LOOP,
    HasSession: OTHER_LOOP,
    HasOpenSession: OTHER_LOOP,
    RunsLoop: NESTED,
    RunsOtherLoop: NESTED,
    RunsThisLoop: NESTED,
    OpensFiles: FILES,
}


@IN
@pytest.mark.parametrize("kind", MISUSES)
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_a_misuse_is_named_and_the_other_batches_come(kind: type[Misuses], options: dict[str, Any]) -> None:
    with DpexDataLoader(kind(), batch_size=8, collate_fn=list, **options) as loader:
        batches = iter(loader)
        assert next(batches) == list(range(8))
        with pytest.raises((UsageError, OSError), match=MISUSES[kind]) as caught:
            next(batches)
        assert isinstance(caught.value, OSError) == (kind is OpensFiles)
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
    with pytest.raises(UsageError, match=r"Indices.__getitem__ is async. Make AddsOne.__getitem__ async, too"):
        indices(AddsOne(Indices()), **options)


def test_a_wrapper_that_gets_undecoded_samples_is_named() -> None:
    class Both(AddsOne):
        def __init__(self) -> None:
            super().__init__(Split(8))
            self.other = Indices()

    with pytest.raises(UsageError, match=r"Both got a sample of .* before it was decoded"):
        indices(Both())


def test_methods_that_must_not_be_async_are_named() -> None:
    with pytest.raises(UsageError, match=r"Files.decode is async: a dpex.AsyncDataset has `async def fetch\("):
        type("Files", (AsyncDataset,), {"decode": Indices.__getitem__})
    with pytest.raises(NotImplementedError, match=r"Files.fetch is missing"):
        type("Files", (AsyncDataset,), {})()[0]
