"""The identity and the parent that `multiprocessing` shows in a forked worker: those of a worker of torch.

A worker is forked by the template, but belongs to the trainer. A dataset that picks a port or a GPU by
``current_process()._identity[0]``, or watches ``parent_process()``, must find what it finds in torch's workers: numbers
that the trainer counts, and the trainer. ``os.getppid()`` is the kernel's, and stays the template.
"""

from __future__ import annotations

import multiprocessing
from typing import Any, NamedTuple


class Kinship(NamedTuple):
    """``name`` and ``identity`` of a process, and the name of its ``parent``, as `multiprocessing` has them."""

    name: str
    identity: tuple[int, ...]
    parent: str


class Names:
    """Gives the next names in this process.

    Args:
        kind: Name of the class of processes, such as ``"ForkProcess"``.
        template: The process that forks the workers, if `multiprocessing` has given it an identity. The first worker
            takes that over, so that the numbers of workers begin where torch's do.
    """

    def __init__(self, kind: str, template: Any) -> None:
        self._kind = kind
        self._free: tuple[int, ...] = getattr(template, "_identity", ())

    def next(self) -> Kinship:
        """Return the kinship of a further worker."""
        here: Any = multiprocessing.current_process()
        identity, self._free = self._free, ()
        identity = identity or (*here._identity, next(multiprocessing.process._process_counter))  # type: ignore[attr-defined]
        return Kinship(f"{self._kind}-{':'.join(map(str, identity))}", identity, here.name)


def take_on(kinship: Kinship, parent_pid: int, parent_fd: int) -> None:
    """Have `multiprocessing` say so in this process from now on.

    Args:
        kinship: Of this process.
        parent_pid: The trainer.
        parent_fd: A pidfd of the trainer, which must stay open. Negative: the system has no pidfds, and the parent of
            this process stays the template, as nothing shows whether the trainer lives.
    """
    here: Any = multiprocessing.current_process()
    here._name, here._identity = kinship.name, kinship.identity
    if parent_fd >= 0:
        process: Any = multiprocessing.process
        here._parent_pid = parent_pid
        here._parent_name = kinship.parent
        process._parent_process = process._ParentProcess(kinship.parent, parent_pid, parent_fd)
