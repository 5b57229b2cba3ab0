"""The key of a cache changes with all that its samples depend on, and with nothing else."""

from __future__ import annotations

import importlib
import os
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dpex.cache.fingerprint import fingerprint
from dpex.errors import CacheError


class Data:
    def __init__(self, **parts: Any) -> None:
        vars(self).update(parts)


def key(version: str = "", paths: Any = (), samples: int = 3, **parts: Any) -> str:
    return fingerprint(Data(**parts), samples, version, paths)


def test_the_same_dataset_has_the_same_key() -> None:
    def parts() -> dict[str, Any]:
        return {
            "files": ["a.jpg", "b.jpg"],
            "tensor": torch.arange(2000.0),
            "parameter": torch.nn.Parameter(torch.ones(3)),
            "sparse": torch.eye(3).to_sparse(),
            "array": np.arange(5),
        }

    assert key(**parts()) == key(**parts())
    assert len(key()) == 32


def test_a_set_counts_with_its_items_and_as_a_set() -> None:
    assert key(kinds={1, 2}) != key(kinds={1, 3})
    assert key(kinds={1, 2}) != key(kinds=[1, 2])


@pytest.mark.parametrize(
    "change",
    [
        {"files": ["a", "c"]},
        {"tensor": torch.tensor([0.0, -0.0])},
        {"array": np.array([1, 2], np.int8)},
        {"version": "2"},
        {"samples": 4},
        {"function": len},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_state_has_another_key(change: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"files": ["a", "b"], "tensor": torch.zeros(2), "array": np.array([1, 2]), "function": max}
    assert key(**parts) != key(**{**parts, **change})


def test_another_source_of_a_class_inside_has_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    keys = set()
    for body in ("return 1", "return 2", "return 1"):
        (tmp_path / "decoder_of_user.py").write_text(f"class Decoder:\n    def __call__(self):\n        {body}\n")
        os.utime(tmp_path / "decoder_of_user.py", (len(keys), len(keys)))
        sys.modules.pop("decoder_of_user", None)
        importlib.invalidate_caches()
        keys.add(key(decoder=importlib.import_module("decoder_of_user").Decoder()))
    assert len(keys) == 2


def test_files_are_looked_at_where_they_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "data.bin"
    file.write_bytes(b"one")
    before = key(paths=[tmp_path])
    assert key(paths=[tmp_path]) == before
    file.write_bytes(b"longer")
    longer = key(paths=[tmp_path])
    os.utime(file, ns=(1, 1))
    assert len({before, longer, key(paths=[tmp_path])}) == 3
    assert key(paths=str(tmp_path)) == key(paths=tmp_path) == key(paths=[tmp_path])
    before = key(paths=tmp_path)
    (tmp_path / "to nowhere").symlink_to(tmp_path / "missing")
    assert key(paths=tmp_path) != before
    with pytest.raises(CacheError, match="does not exist"):
        key(paths=[tmp_path / "missing"])


def test_functions_without_a_name_count_with_their_variables() -> None:
    def scaled(factor: int) -> Any:
        return lambda image: image * factor

    assert key(step=scaled(2)) == key(step=scaled(2)) != key(step=scaled(3))
    assert key(step=scaled(2)) != key(step=lambda image: image)


def test_functions_of_one_source_count_with_all_that_they_are_bound_to() -> None:
    def keyword(factor: int) -> Any:
        return lambda image, *, factor=factor: image * factor

    def local(factor: int, module: Any = np) -> Any:
        class Step:
            def __init__(self) -> None:
                super().__init__()

            def __call__(self, image: Any) -> Any:
                return module.asarray(image) * factor

            @staticmethod
            def again(image: Any) -> Any:
                return again(image)

        def again(image: Any) -> Any:
            return again(image)

        return Step

    both = [lambda image: image + 1, lambda image: image + 2]  # in one line
    assert key(step=both[0]) != key(step=both[1])
    for made in (keyword, local, lambda factor: local(factor)()):
        assert key(step=made(2)) == key(step=made(2)) != key(step=made(3))


def test_a_class_without_a_source_counts_with_its_code_and_constants() -> None:
    def made(size: int, body: str, names: str = "('a', 'b')") -> str:
        source = f"class Step:\n    size = {size}\n    @property\n    def name(self): return 1 in {names}\n"
        found: dict[str, Any] = {"__name__": "notebook"}
        exec(f"{source}    def __call__(self, image): return image {body}", found)
        return key(step=found["Step"]())

    assert made(1, "+ 1") == made(1, "+ 1")
    assert made(1, "+ 1", "{'a', 'b'}") == made(1, "+ 1", "{'b', 'a'}")
    assert len({made(1, "+ 1"), made(2, "+ 1"), made(1, "- 1"), made(1, "+ 2"), made(1, "+ 1", "('a', 'c')")}) == 5


def test_a_dataset_that_cannot_be_pickled_needs_a_version() -> None:
    with pytest.raises(CacheError, match="cache_version="):
        key(lock=threading.Lock())
    assert key(version="1", lock=threading.Lock()) == key(version="1", lock=threading.Lock())
    assert key(version="1", lock=threading.Lock()) != key(version="2", lock=threading.Lock())
