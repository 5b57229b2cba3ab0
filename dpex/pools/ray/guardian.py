"""The actor that stands for an agent on its node: fetches what is shipped, starts the agent's process, and watches it.

The class is local, so that it travels by value: a node without dpex can say so instead of failing. It imports neither
torch nor numpy's users; that is left to the agent's process, which has no thread of Ray's. The agent ends with the
guardian, which it watches. It is not left to PR_SET_PDEATHSIG: that signal comes when the *thread* ends that started
the process, and Ray's threads come and go.

Where the agent cannot reach the trainer by itself, the guardian relays bytes between the trainer and a socket of the
agent's (`open_tunnel`): from a node that cannot reach the trainer, to a trainer that is no part of the cluster
(``ray://``), and where Ray encrypts its traffic. Large batches are copied four times more then.
"""

from __future__ import annotations

import contextlib
import importlib
import socket
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

CALLS_AT_ONCE = 8
"""Calls that one guardian answers at a time: it waits for its agent's end, relays in both directions, and more."""
PIECE_BYTES = 8 << 20
"""The most that one call relays; it takes some milliseconds, as long as the call itself or longer."""


@cache
def guardian_class(session: str = "") -> Any:  # noqa: C901  (the key of the cache; a class, which must be local)
    """Return the actor's class; ``session`` as in `dpex._ray.client_session`."""

    class DpexNode:
        def __init__(self) -> None:
            import os
            import threading

            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
            self._lock = threading.Lock()
            self._process: Any = None
            self._report = -1
            self._shipped: Any = None
            self._tunnel: Any = None

        def node(self) -> str:
            """Return the number of the node, in hex."""
            import ray

            return str(ray.get_runtime_context().get_node_id())

        def ship(self, number: int, refs: list[Any]) -> str:
            """Fetch the parts of a dataset, and return where processes of this node can open them.

            It is "" if another dataset was shipped or this one forgotten meanwhile: calls may overtake each other.
            """
            import ray

            files = self._files()
            files.expect(number)
            return str(files.put(number, ray.get(refs[0])))

        def unship(self, number: int) -> None:
            """Forget this shipment and those before it; who has opened it keeps it."""
            self._files().expect(number + 1)

        def _files(self) -> Any:
            from dpex.pools.agent.shipped_file import ShippedFiles

            with self._lock:
                if self._shipped is None:
                    self._shipped = ShippedFiles()
                return self._shipped

        def start(self, address: tuple[Any, ...] | None) -> tuple[str, int, str]:
            """Start the agent's process, which connects to the trainer there; None: through this actor. Return
            the node's name for people, this process's number, and why the agent cannot be started, or ""."""
            import os
            import pickle
            import socket
            import subprocess
            import sys

            me = f"{socket.gethostname()} ({self.node()[:8]})", os.getpid()
            try:
                import dpex.pools.agent.main  # noqa: F401
            except Exception as error:
                return *me, f"dpex cannot be imported there: {type(error).__name__}: {error}"
            read, write = os.pipe()
            self._report, report = os.pipe()
            self._tunnel, theirs = socket.socketpair()
            code = "import sys; sys.path[:] = {!r}; from dpex.pools.agent.main import main; main({})"
            path = [entry for entry in sys.path if isinstance(entry, str)]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code.format(path, read)],
                    pass_fds=[read, report, theirs.fileno()],
                    stdin=subprocess.DEVNULL,
                )
                with os.fdopen(write, "wb") as pipe:
                    pickle.dump((os.getpid(), address, theirs.fileno(), report), pipe)
            finally:
                os.close(read)
                os.close(report)
                theirs.close()
            return *me, ""

        def watch(self) -> tuple[int, str]:
            """Wait for the end of the agent's process; return its exit code, and what it said of it."""
            import os

            code = int(self._process.wait())
            with os.fdopen(self._report, "rb") as pipe:
                return code, pipe.read().decode(errors="replace")

        def stop(self) -> None:
            """End the agent's process, if there is one."""
            if self._process is not None:
                self._process.kill()
                self._process.wait()

        def send(self, data: bytes) -> None:
            """Hand bytes of the trainer's on to the agent."""
            self._tunnel.sendall(data)

        def receive(self, most: int) -> bytes:
            """Wait for bytes of the agent's; none mean that it has ended."""
            return bytes(self._tunnel.recv(most))

        def __repr__(self) -> str:
            return "dpex node"

    return importlib.import_module("ray").remote(DpexNode)


def open_tunnel(guardian: Any) -> socket.socket:
    """Return a socket that leads to the guardian's agent."""
    get = importlib.import_module("ray").get
    ours, theirs = socket.socketpair()

    def carry_out() -> None:  # one call after the other, as Ray does not promise their order
        while data := theirs.recv(PIECE_BYTES):
            get(guardian.send.remote(data))

    def carry_in() -> None:
        while data := get(guardian.receive.remote(PIECE_BYTES)):
            theirs.sendall(data)

    for name, carry in (("dpex-tunnel-out", carry_out), ("dpex-tunnel-in", carry_in)):
        threading.Thread(target=_carry, args=(carry, theirs), name=name, daemon=True).start()
    return ours


def _carry(carry: Callable[[], None], end: socket.socket) -> None:
    """Carry bytes until either end is gone, and wake all readers; the descriptor goes with the other thread."""
    with contextlib.suppress(Exception):
        carry()
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
