"""Requirements of trainings that share batches: an address at which they meet, and equal data.

**The place** is an abstract socket address of this machine. The kernel gives an address to one listener at a time, and
frees it when the listener ends, so the address needs no lock and no removal. A training that finds no listener begins
to listen, and hands the socket to a new producer. Any user can connect to such an address, or listen at it. So both
ends ask the kernel for the user of their peer, and reject other users.

**Facts** that trainings must have in common are texts. A batch is a function of its samples, the dataset, the collate
function and its seed. The producer compares the samples batch by batch, and the other facts once per pass. The facts of
a dataset are its type, its length and its constructor's arguments, if these have the same text in every process. Its
content is not compared.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import inspect
import os
import socket
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset

from dpex.errors import ShareError
from dpex.worker.setup import WorkerSetup

Facts = dict[str, str]
BACKLOG = 128
"""Maximum connections that wait to be accepted, because trainings may start at the same moment."""
_CREDENTIALS = struct.Struct("3i")
_NAME_LETTERS = 24
"""Characters of a hash: few enough for an address of at most 107 bytes, and enough for distinct names."""
_MOST_LETTERS = 200
"""Maximum characters of a value in a message."""
_MOST_ITEMS = 16
"""Maximum length of a container whose items are compared. For a longer container only the length is compared."""
_LEVELS = 3
"""Depth to which datasets in datasets are compared, such as a Subset of a ConcatDataset of an ImageFolder."""
_REMEDIES = {
    "base seed": "Seed both alike before iter(), by torch.manual_seed(...) or generator=",
    "version of torch": "Use one version of torch",
}


def peer(connection: socket.socket) -> tuple[int, int]:
    """Return the pid and the user id of the other end. If this end has connected, the other end is the listener."""
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class MeetingPlace:
    """The place where the trainings with the same ``key`` meet. Trainings in other containers have another place."""

    def __init__(self, key: str) -> None:
        processes = Path("/proc/self/ns/pid").readlink()
        name = hashlib.sha256(f"{processes}\n{key}".encode()).hexdigest()[:_NAME_LETTERS]
        self.address: str = f"\0dpex-share-{os.getuid()}-{name}"

    def connect(self) -> socket.socket | None:
        """Return a connection to the listener, or None without one. Raises ShareError if another user listens."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(self.address)
            if (uid := peer(connection)[1]) != os.getuid():
                raise ShareError(f"share: a process of another user (number {uid}) listens where this training would")
            return connection
        except ConnectionRefusedError:
            connection.close()
            return None
        except BaseException:
            connection.close()
            raise

    def listen(self) -> socket.socket | None:
        """Begin to listen at the address; return None if another process listens."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind(self.address)
            listener.listen(BACKLOG)
            return listener
        except BaseException as error:
            listener.close()
            if isinstance(error, OSError) and error.errno == errno.EADDRINUSE:
                return None
            raise


# -- the facts ---------------------------------------------------------------------------------------------------------


def facts_of(name: str, setup: WorkerSetup) -> Facts:
    """Return the facts that all trainings of share ``name`` must have in common."""
    return {
        "share": name,
        **_described("dataset", setup.dataset),
        "collate_fn": _named(setup.collate_fn),
        "worker_init_fn": _named(setup.worker_init_fn),
        "base seed": str(setup.base_seed),
        "modes of torch": str(setup.modes),
        "version of torch": str(torch.__version__),
    }


def difference(known: Mapping[str, str], other: Mapping[str, str]) -> str:
    """Return the reason why trainings with ``other`` and ``known`` facts cannot share batches, or ""."""
    for name in dict.fromkeys([*known, *other]):
        there, here = known.get(name, "not there"), other.get(name, "not there")
        if there != here:
            return (
                f"share={known['share']!r}: the {name} of this training is {here}, and that of the training which "
                f"began to share is {there}. {_REMEDIES.get(name, 'Give both the same')}, or give another "
                "name to one of them"
            )
    return ""


def other_order(facts: Mapping[str, str], epoch: int, number: int, known: Any, other: Any) -> str:
    """Return the reason why trainings cannot share a batch: one has the ``known`` samples in it, one the ``other``."""
    return (
        f"share={facts['share']!r}: batch {number} of epoch {epoch} has the samples {_shortened(repr(other))} in this "
        f"training, and {_shortened(repr(known))} in another. Have both draw the same order (one seed, one sampler, "
        "one set_epoch()), or give another name to one of them"
    )


def _described(what: str, dataset: Any, levels: int = _LEVELS) -> Facts:
    found = {f"type of the {what}": _named(type(dataset))}
    with contextlib.suppress(Exception):
        found[f"length of the {what}"] = str(len(dataset))
    for name, value in _made_with(dataset).items():
        if not isinstance(value, Dataset):
            found |= {f"{name} of the {what}": text for text in _texts(value)}
        elif levels > 1:
            found |= _described(f"{name} of the {what}", value, levels - 1)
    return found


def _made_with(value: Any) -> dict[str, Any]:
    """Return the attributes that have the name of an argument of the constructor."""
    attributes = getattr(value, "__dict__", {})
    with contextlib.suppress(TypeError, ValueError):
        names = {name: name if name in attributes else f"_{name}" for name in inspect.signature(type(value)).parameters}
        return {name: attributes[own] for name, own in names.items() if own in attributes}
    return {}


def _texts(value: Any) -> list[str]:
    """Return the text of a value, or an empty list if the text differs by process."""
    with contextlib.suppress(Exception):
        text = _text(value)
        return [] if " at 0x" in text else [_shortened(text)]
    return []


def _text(value: Any) -> str:
    """Return the repr of a value, with the items of sets in the order of their texts, because their own order differs
    by process."""
    if not isinstance(value, str) and hasattr(value, "__len__") and len(value) > _MOST_ITEMS:
        return f"a {type(value).__name__} of {len(value)}"
    if isinstance(value, (set, frozenset)):
        return f"{type(value).__name__}({', '.join(sorted(map(_text, value)))})"
    if type(value) in (list, tuple):
        return f"{type(value).__name__}({', '.join(map(_text, value))})"
    if type(value) is dict:
        return f"{{{', '.join(f'{_text(name)}: {_text(one)}' for name, one in value.items())}}}"
    return _named(value) if hasattr(value, "__qualname__") else repr(value)


def _named(value: Any) -> str:
    """Return the qualified name of a function or type, or of the type of another object."""
    if value is None:
        return "None"
    function = getattr(value, "func", value)
    function = function if hasattr(function, "__qualname__") else type(function)
    return f"{function.__module__}.{function.__qualname__}"


def _shortened(text: str) -> str:
    return text if len(text) <= _MOST_LETTERS else f"{text[:_MOST_LETTERS]}… ({len(text)} characters)"
