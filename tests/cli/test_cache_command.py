"""`dpex cache`: which caches are listed and removed. The caches are files that it only lists and removes."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dpex.cli import cache
from dpex.cli.main import main

STORED = SimpleNamespace(name="Photos", kept=1, samples=2, nbytes=10, budget=20)


@pytest.fixture
def paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two caches."""
    found = [tmp_path / key for key in ("4c73", "9f01")]

    def caches(disks: Any) -> Any:
        return [cache._Cache(key=p.name, where="/a[/b]", path=p, stored=STORED, is_used=False) for p in found]

    for path in found:
        path.touch()
    monkeypatch.setattr(cache, "_caches", caches)
    return found


def test_a_folder_is_shown_as_it_is_named(paths: list[Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cache", "ls"]) == 0
    assert "/a[/b]" in capsys.readouterr().out


@pytest.mark.parametrize("keys", [[""], ["4c", ""], ["4c", "none"], []], ids=str)
def test_a_key_that_is_of_no_cache_removes_nothing(
    keys: list[str], paths: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["cache", "rm", *keys]) == 1
    assert all(path.exists() for path in paths)
    assert "No such cache" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "left"), [(["4c"], [False, True]), (["--all"], [False, False])], ids=str)
def test_caches_that_are_named_are_removed(words: list[str], left: list[bool], paths: list[Path]) -> None:
    assert main(["cache", "rm", *words]) == 0
    assert [path.exists() for path in paths] == left
