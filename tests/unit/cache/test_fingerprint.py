"""A fingerprint changes with the state and the code of a dataset, and with nothing else that differs between runs."""

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


def key(paths: Any = (), samples: int = 3, **parts: Any) -> str:
    return fingerprint(Data(**parts), samples, paths)


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
        {"samples": 4},
        {"function": len},
    ],
    ids=lambda change: next(iter(change)),
)
def test_another_state_has_another_key(change: dict[str, Any]) -> None:
    parts: dict[str, Any] = {"files": ["a", "b"], "tensor": torch.zeros(2), "array": np.array([1, 2]), "function": max}
    assert key(**parts) != key(**{**parts, **change})


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


def test_functions_of_one_source_are_keyed_by_what_they_bind() -> None:
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


def test_a_class_without_source_is_keyed_by_code_and_constants() -> None:
    def made(size: int, body: str, names: str = "('a', 'b')") -> str:
        source = f"class Step:\n    size = {size}\n    @property\n    def name(self): return 1 in {names}\n"
        found: dict[str, Any] = {"__name__": "notebook"}
        exec(f"{source}    def __call__(self, image): return image {body}", found)
        return key(step=found["Step"]())

    assert made(1, "+ 1") == made(1, "+ 1")
    assert made(1, "+ 1", "{'a', 'b'}") == made(1, "+ 1", "{'b', 'a'}")
    assert len({made(1, "+ 1"), made(2, "+ 1"), made(1, "- 1"), made(1, "+ 2"), made(1, "+ 1", "('a', 'c')")}) == 5


def test_unpicklable_values_are_keyed_by_their_text(tmp_path: Path) -> None:
    assert (
        key(lock=threading.Lock(), size=1) == key(lock=threading.Lock(), size=1) != key(lock=threading.Lock(), size=2)
    )
    files = [tmp_path / name for name in ("a", "b")]
    for file in files:
        file.write_text("text")
    with files[0].open() as one, files[0].open() as again, files[1].open() as other:
        assert key(file=one) == key(file=again) != key(file=other)


def test_generators_and_mapped_content_are_not_part_of_the_key(tmp_path: Path) -> None:
    assert key(rng=np.random.default_rng(1)) == key(rng=np.random.default_rng(2))
    mapped = [np.memmap(tmp_path / name, np.uint8, "w+", shape=100) for name in ("a", "b")]
    before = key(data=mapped[0])
    mapped[0][:50] = 1
    assert key(data=mapped[0]) == before != key(data=mapped[1])
    assert key(data=mapped[0][:50]) != key(data=mapped[0][50:])


def test_a_comment_does_not_count_and_what_is_loaded_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file may be edited after it was loaded: the code that runs counts."""
    monkeypatch.syspath_prepend(tmp_path)
    source, keys = "class Decoder:\n    size = ({}, 1)\n    def __call__(self):\n        return 1{}\n", []
    for size, comment in ((1, ""), (1, "  # as before"), (2, "")):
        (tmp_path / "edited_by_user.py").write_text(source.format(size, comment))
        os.utime(tmp_path / "edited_by_user.py", (len(keys), len(keys)))
        sys.modules.pop("edited_by_user", None)
        importlib.invalidate_caches()
        decoder = importlib.import_module("edited_by_user").Decoder()
        (tmp_path / "edited_by_user.py").write_text("")
        keys.append(key(decoder=decoder))
    assert keys[0] == keys[1] != keys[2]
