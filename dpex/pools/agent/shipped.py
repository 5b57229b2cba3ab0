"""The dataset as a pool ships it to a node, unpacked there, and a look whether the node can serve it."""

from __future__ import annotations

import contextlib
import os
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from dpex._torch import WorkerInfo, set_worker_info
from dpex._torch import collate as torch_collate
from dpex.errors import DpexError
from dpex.pools.agent.shipped_file import map_shipped
from dpex.pools.local.worker_process import WorkerPlan
from dpex.transport.codec import codec_signature
from dpex.transport.pickling import unpack
from dpex.worker.setup import WorkerSetup


@dataclass(frozen=True, kw_only=True)
class ShippedContents:
    """The setup, and torch's ``default_collate_fn_map`` as it is here: the user may have changed it."""

    setup: WorkerSetup
    collate_entries: dict[Any, Any] = field(default_factory=lambda: dict(torch_collate.default_collate_fn_map))


class PoolOrder(NamedTuple):
    """The pool that an agent is to keep.

    Attributes:
        shared_queue: True if any worker makes any ticket.
        path: Where on its node the shipped file can be opened.
        codec: See `dpex.transport.codec.codec_signature`.
        probe: A pickled index that the dataset is tried with first, or None.
        compression: How buffers are compressed for the network: "zstd", or None.
    """

    shared_queue: bool
    path: str
    codec: str
    probe: bytes | None
    compression: str | None = None


class UnfitError(DpexError):
    """A node lacks what the dataset needs."""


class ShippedPlan:
    """A plan that is unpacked by the process that forks the workers, which share it."""

    def __init__(self, order: PoolOrder) -> None:
        self._order = order

    def opened(self) -> WorkerPlan:
        """Return the plan, in a template. Raises UnfitError, and what unpacking raises."""
        order = self._order
        if order.codec != codec_signature():
            raise UnfitError("torch there has other number types than the trainer's torch")
        contents = open_shipped(order.path)
        torch_collate.default_collate_fn_map.update(contents.collate_entries)
        if order.probe is not None and not contents.setup.iterable:
            _probe(contents.setup, pickle.loads(order.probe))
        return WorkerPlan(contents.setup, order.shared_queue, far=True)


def open_shipped(path: str) -> ShippedContents:
    """Return the contents of a shipped file."""
    with Path(path).open("rb+") as file:
        header, *buffers = map_shipped(file.fileno())
    contents: ShippedContents = unpack(header, buffers)
    return contents


def _probe(setup: WorkerSetup, index: Any) -> None:
    """Get one sample, in a process of its own, so that it leaves no trace here. Raises UnfitError."""
    read, write = os.pipe()
    pid = os.fork()
    if not pid:
        with contextlib.suppress(BaseException):
            os.write(write, _what_lacks(setup, index)[: os.fpathconf(write, "PC_PIPE_BUF")])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        lacks = pipe.read()
    os.waitpid(pid, 0)
    if lacks:
        raise UnfitError(f"a sample cannot be fetched there: {lacks.decode(errors='replace')}")


def _what_lacks(setup: WorkerSetup, index: Any) -> bytes:
    """Return what the node lacks, or b"". Any other failure is the dataset's own: it will show where the sample is
    wanted."""
    set_worker_info(WorkerInfo(id=0, num_workers=setup.num_workers, seed=setup.base_seed, dataset=setup.dataset))
    try:
        setup.dataset[index]
    except (ImportError, OSError) as error:
        return f"{type(error).__name__}: {error}".encode()
    except Exception:
        return b""
    return b""
