"""The harness must be able to fail: each wrong loader below is caught, and torch's own passes."""

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from .datasets import Counting, Failing, Of, as_is, as_tensor
from .harness import Loader, assert_same, drain, normal_text


def loader_of(batches: Callable[[Iterator[Any]], Any]) -> Loader:
    """A loader whose iterator is what ``batches`` makes of torch's."""

    class Changed(DataLoader[Any]):
        def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
            return iter(batches(super().__iter__()))

    return type("DataLoader", (Changed,), {})


def loader_with(change: Callable[[Any], Any]) -> Loader:
    return loader_of(lambda batches: map(change, batches))


def raising_instead(error: Exception) -> Loader:
    def batches(inner: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from inner
        except ValueError as found:
            raise (error if error.args else type(error)(str(found))) from None

    return loader_of(batches)


class Drawing(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        random.random()
        super().__init__(*args, **kwargs)


class Chatty(DataLoader[Any]):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        warnings.warn("by the way", stacklevel=2)
        super().__init__(*args, **kwargs)


def read_tensors(cls: Loader) -> Any:
    return list(cls(Of(as_tensor, 5), batch_size=2))


def read_pairs(cls: Loader) -> Any:
    return list(cls(Counting(4), batch_size=2, collate_fn=as_is))


def fail_value() -> None:
    raise ValueError("bad sample")


def read_failing(cls: Loader) -> Any:
    return drain(iter(cls(Failing(fail_value, 3, at=[1]))))


WRONG: dict[str, tuple[Any, Loader]] = {
    "value": (read_tensors, loader_with(lambda t: t + 1e-7 * t)),
    "stride": (read_tensors, loader_with(lambda t: t.transpose(1, 2).contiguous().transpose(1, 2))),
    "negative zero": (read_tensors, loader_with(lambda t: torch.where(t == 0, -0.0, t))),
    "type of an item": (read_pairs, loader_with(lambda b: [float(x) for x in b])),
    "order": (read_tensors, loader_of(lambda batches: list(batches)[::-1])),
    "a batch missing": (read_tensors, loader_of(lambda batches: list(batches)[:-1])),
    "random state": (read_tensors, Drawing),
    "a warning": (read_tensors, Chatty),
    "type of an error": (read_failing, raising_instead(RuntimeError())),
    "text of an error": (read_failing, raising_instead(ValueError("other"))),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_loader_is_caught(wrong: str) -> None:
    script, cls = WRONG[wrong]
    with pytest.raises(AssertionError, match="differ"):
        assert_same(script, cls)


@pytest.mark.parametrize("script", [read_tensors, read_pairs, read_failing])
def test_an_equal_loader_passes(script: Any) -> None:
    assert_same(script, loader_with(as_is))


def test_a_script_that_fails_on_torch_is_no_pass() -> None:
    def broken(cls: Loader) -> None:
        raise ValueError("script")

    with pytest.raises(AssertionError, match="script itself fails"):
        assert_same(broken, DataLoader)


def test_only_the_library_s_frames_leave_a_traceback() -> None:
    text = (
        "Caught ValueError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        '  File "/lib/torch/utils/data/_utils/worker.py", line 363, in _worker_loop\n'
        "    data = fetcher.fetch(index)\n"
        "           ^^^^^^^^^^^^^^^^^^^^\n"
        f'  File "{__file__}", line 3, in fail_value\n'
        '    raise ValueError("bad")\n'
        "ValueError: bad\n"
    )
    assert normal_text(text) == (
        "Caught ValueError in DataLoader worker process 1.\n"
        "Original Traceback (most recent call last):\n"
        "  in fail_value\n"
        "ValueError: bad\n"
    )
