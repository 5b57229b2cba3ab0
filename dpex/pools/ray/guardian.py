"""The actor that stands for an agent on its node: fetches what is shipped, starts the agent's process, and watches it.

The class is local, so that it travels by value: a node without dpex can say so instead of failing. It imports neither
torch nor numpy's users; that is left to the agent's process, which has no thread of Ray's.

Where the agent cannot reach the trainer by itself, the guardian relays: `send` and `receive` move bytes between the
trainer and a socket of the agent's (see `tunnel`). The agent ends with the guardian, which it watches. It is not left
to PR_SET_PDEATHSIG: that signal comes when the *thread* ends that started the process, and Ray's threads come and go.
"""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

CALLS_AT_ONCE = 8
"""Of one guardian: it waits for its agent's end, relays in both directions, and must still answer."""


@cache
def guardian_class(session: str = "") -> Any:  # noqa: C901  (the key of the cache; a class, which must be local)
    """The actor's class; ``session`` as in `dpex._ray.client_session`."""

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

        def place(self) -> tuple[str, str, int]:
            """The node's number, a name for people, and this process's number."""
            import os
            import socket

            import ray

            node = ray.get_runtime_context().get_node_id()
            return node, f"{socket.gethostname()} ({node[:8]})", os.getpid()

        def ship(self, number: int, refs: list[Any]) -> str:
            """Fetch the parts of a dataset; returns where processes of this node can open them, "" if another one was
            shipped or this one forgotten in the meantime: calls are not carried out in their order."""
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

        def start(self, address: tuple[Any, ...] | None) -> str:
            """Start the agent's process, which connects to the trainer at this address, or through this actor if there
            is none. Returns why it cannot be started, or ""."""
            import os
            import pickle
            import socket
            import subprocess
            import sys

            try:
                import dpex.pools.agent.main  # noqa: F401
            except Exception as error:
                return f"dpex cannot be imported there: {type(error).__name__}: {error}"
            self.stop()
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
            return ""

        def watch(self) -> tuple[int, str]:
            """Wait for the end of the agent's process; returns its exit code, and what it said of it."""
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
