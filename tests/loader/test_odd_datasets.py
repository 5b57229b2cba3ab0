"""Datasets that raise what torch does not ask for, or have threads that a fork does not copy: all samples come."""

import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset, get_worker_info

from dpex import DpexDataLoader


class Table:
    """Unknown attributes are columns; one that is missing is a KeyError, for which ``getattr`` has no default."""

    def __init__(self) -> None:
        self.__dict__["columns"] = {"a": list(range(20))}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.__dict__["columns"][name]

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(self.a[index])


class StreamOfTable(Table, IterableDataset[torch.Tensor]):
    def __iter__(self) -> Iterator[torch.Tensor]:
        info = get_worker_info()
        assert info is not None
        for index in range(info.id, 20, info.num_workers):
            yield self[index]


class Remote(Table):
    """Every unknown attribute is a function, as those of a stand-in for an object elsewhere."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *_, **__: {"remote": name}

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


class _OutOfContext:
    """Flask's ``current_app`` outside of a request."""

    @property
    def __class__(self) -> Any:
        raise RuntimeError("working outside of the application's context")


class WithProxies:
    """Holds a weak proxy whose object is gone, and a proxy for what is not there."""

    def __init__(self) -> None:
        self.owner = weakref.proxy(Table())
        self.app = _OutOfContext()

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.tensor(index)


@pytest.mark.smoke
@pytest.mark.parametrize("workers", [2, "auto"])
@pytest.mark.parametrize("kind", [Table, StreamOfTable, Remote, WithProxies])
def test_each_sample_comes_once_in_each_epoch(kind: Any, workers: Any) -> None:
    with DpexDataLoader(kind(), batch_size=4, num_workers=workers) as loader:
        for _ in range(2):
            assert sorted(torch.cat(list(loader)).tolist()) == list(range(20))


class Resized:
    """Resizes an image in the worker, as the trainer did before."""

    def __init__(self) -> None:
        self.image = np.zeros((1500, 2000, 3), np.uint8)
        self.resize()

    def resize(self) -> torch.Tensor:
        import cv2

        return torch.from_numpy(cv2.GaussianBlur(cv2.resize(self.image, (700, 500)), (9, 9), 2))

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.resize()


def test_a_forked_worker_does_not_hang_on_opencv_threads() -> None:
    """Setting OpenCV's thread count in a forked worker once waited for ever for threads the fork had not copied."""
    pytest.importorskip("cv2")
    assert len(list(DpexDataLoader(Resized(), batch_size=2, num_workers=2))) == 4
