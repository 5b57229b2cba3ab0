"""A dataset that a spawned worker cannot receive: the warning names the part and a remedy that helps."""

import threading
from pickle import PicklingError
from types import SimpleNamespace
from typing import Any

import pytest

from dpex import DpexDataLoader


class Reads(list[int]):
    """A dataset with something open."""

    def __init__(self, store: Any) -> None:
        super().__init__(range(4))
        self.store = store


@pytest.mark.parametrize(
    ("store", "words"),
    [
        (
            SimpleNamespace(guard=threading.Lock()),
            r"dataset\.store\.guard \(a _thread\.lock\).*leave it out of the pickle",
        ),
        (
            {"files": [threading.Lock()]},
            r"dataset\.store\['files'\]\[0\] \(a _thread\.lock\).*leave it out of the pickle",
        ),
    ],
    ids=["attribute", "item"],
)
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_warning_names_what_cannot_be_pickled(method: str, store: Any, words: str) -> None:
    loader = DpexDataLoader(Reads(store), num_workers=1, multiprocessing_context=method)
    with (
        pytest.warns(UserWarning, match=rf"(?s){words}.*or use the start method 'fork'"),
        pytest.raises((TypeError, AttributeError, PicklingError), match="pickle"),
    ):
        iter(loader)
