"""An accelerator that is not there: torch believes in one, and pinning is a copy that tells which thread made it."""

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.data._utils.pin_memory as torch_pinning
from torch_features import HAS_ACCELERATOR


def is_available() -> bool:
    """Whether torch has an accelerator to pin memory for."""
    return bool(torch.accelerator.is_available() if HAS_ACCELERATOR else torch.cuda.is_available())


class Accelerator:
    """What a test sees of it, and ``before``, which it may set: called with each batch in the thread that pins."""

    def __init__(self) -> None:
        self.index = 0
        self.pinned = 0
        self.before: Callable[[Any], None] = lambda batch: None
        self.indices_set: list[tuple[str, int]] = []

    def set_index(self, index: int) -> None:
        self.indices_set.append((threading.current_thread().name, index))

    def pin(self, batch: Any, device: str | None = None) -> Any:
        assert device in ("cuda", None)  # None until torch 2.8: whatever is the current one
        self.before(batch)
        copied = _copied(batch)
        self.pinned += 1
        return copied


def _copied(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        copy = batch.clone()
        copy.pinned_in = threading.current_thread().name  # type: ignore[attr-defined]
        return copy
    if isinstance(batch, (list, tuple)):
        return type(batch)(_copied(item) for item in batch)
    if isinstance(batch, dict):
        return {key: _copied(item) for key, item in batch.items()}
    return batch


def tell_torch(monkeypatch: pytest.MonkeyPatch, index: Callable[[], int], set_index: Callable[[int], None]) -> None:
    """Let torch believe that there is one device of kind "cuda"."""
    if HAS_ACCELERATOR:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
        monkeypatch.setattr(torch.accelerator, "current_device_index", index)
        monkeypatch.setattr(torch.accelerator, "set_device_index", set_index)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: 1)
    else:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "current_device", index)
        monkeypatch.setattr(torch.cuda, "set_device", set_index)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)


def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[Accelerator]:
    """The body of a fixture."""
    made = Accelerator()
    tell_torch(monkeypatch, lambda: made.index, made.set_index)
    monkeypatch.setattr(torch_pinning, "pin_memory", made.pin)
    yield made
    made.before = lambda batch: None
