"""`DpexDataLoader.resize` of a loader whose iterators run."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
from test_sizing import options

from dpex.loader import resizing
from dpex.schedule.prefetch import Sizes


class Running:
    """An engine that takes down what it is asked for."""

    def __init__(self, *, closed: bool = False) -> None:
        self.closed = closed
        self.asked: list[Sizes] = []

    def resize(self, sizes: Sizes) -> None:
        self.asked.append(sizes)


def loader_of(monkeypatch: pytest.MonkeyPatch, *engines: Running, **changes: Any) -> Any:
    found = options(num_workers=3, may_be_remote=True, **changes)
    monkeypatch.setattr(resizing, "size_options", lambda _: found)
    iterators = [SimpleNamespace(_engine=engine) for engine in engines]
    return SimpleNamespace(
        _current_sizes=lambda _: Sizes(local=0, remote=3, prefetch=None),
        _tuning=lambda _: None,
        _runtime=SimpleNamespace(iterators=iterators),
    )


@pytest.mark.parametrize("changes", [{"seeding": "worker"}, {"seeding": "batch", "is_iterable": True}])
def test_workers_that_stay_are_warned_of(monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any]) -> None:
    loader = loader_of(monkeypatch, ended := Running(closed=True), running := Running(), **changes)
    with pytest.warns(RuntimeWarning, match="to 2 local and 1 remote workers takes effect with the next iterator"):
        resizing.resize(loader, 2, 1, None)
    assert ended.asked == running.asked == [loader._sizes] == [Sizes(local=2, remote=1, prefetch=None)]


def test_nothing_is_said_where_all_takes_effect_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resizing.resize(loader_of(monkeypatch, Running(), seeding="batch"), 2, 1, None)
        resizing.resize(loader_of(monkeypatch, Running(), seeding="worker"), None, None, 7)
        resizing.resize(loader_of(monkeypatch, Running(closed=True), seeding="worker"), 2, 1, None)
