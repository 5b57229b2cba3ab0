"""The interface by which a local pool has processes started, and learns how they end.

There are two ways. With "fork" a template is forked once and forks every worker (`fork_server`); a clean server forks
that template where forking the trainer is unsafe (`clean_fork_server`). With "spawn" and "forkserver" each worker is
started on its own, and imports and unpickles for itself (`direct_start`).
"""

from __future__ import annotations

from typing import Any, Protocol


class Starter(Protocol):
    """A way to start processes; it keeps what their workers need."""

    is_quick: bool
    """True if a worker serves milliseconds after it was asked for: it inherits the dataset, and unpickles nothing."""

    def open(self) -> ProcessSource:
        """Return the source of processes. Another one may be opened once this one has ended."""

    def close(self) -> None:
        """Nothing further will be started; idempotent."""


class ProcessSource(Protocol):
    """Starts processes, and tells how they end."""

    ready: bool
    """True if it takes requests."""

    @property
    def overdue(self) -> bool:
        """Return True if it ought to be ready by now, and is not."""

    def fileno(self) -> int:
        """Return a descriptor that is readable when there is `news`."""

    def why_not(self) -> str:
        """Return why it has not become ready: the end of a sentence that begins with its name."""

    def start_process(self, number: int, fds: list[int], arguments: tuple[Any, ...]) -> str:
        """Ask for a process with these descriptors, which the caller may close afterwards; returns its name.

        `news` says if it ended. It is for the caller not to ask for more than some hundred at once.
        """

    def news(self) -> list[tuple[Any, ...]]:
        """Return what happened since the last call.

        ``("ready", pid)`` or ``("unfit", why)``;
        ``("up", number, pid)`` or ``("refused", number, why)``; ``("exit", number, pid, code)``;
        ``("dead",)`` once it ended.
        """

    def end(self, grace_s: float) -> None:
        """Have the processes ended within ``grace_s`` seconds."""

    def join(self, timeout_s: float) -> list[tuple[Any, ...]]:
        """Wait at most ``timeout_s`` seconds until all processes have ended; returns the last news."""
