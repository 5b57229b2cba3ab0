"""Save and load a loader's state as a checkpoint does that runs no code."""

import io
from typing import Any

import torch


def saved(state: Any) -> bytes:
    """The file that `torch.save` writes."""
    file = io.BytesIO()
    torch.save(state, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    """The state in the file; classes that have to be imported are refused, numpy's too."""
    return torch.load(io.BytesIO(data), weights_only=True)


def kept(state: Any) -> Any:
    """The state from a checkpoint that it was saved in."""
    return loaded(saved(state))


def leaves(state: Any, path: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], Any]:
    """Values that lie in dicts and lists, each with the keys that lead to it."""
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else None
    if items is None:
        return {path: state}
    return {key: value for name, each in items for key, value in leaves(each, (*path, name)).items()}
