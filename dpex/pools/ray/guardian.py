"""The actor that stands for an agent on its node: fetches what is shipped, starts the agent's process, and watches it.

The class is local, so that it travels by value: a node without dpex can say so instead of failing. It imports neither
torch nor numpy's users; that is left to the agent's process, which has no thread of Ray's. The agent ends with the
guardian, which it watches. It is not left to PR_SET_PDEATHSIG: that signal comes when the *thread* ends that started
the process, and Ray's threads come and go.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import secrets
from collections.abc import Mapping
from functools import cache
from typing import Any

CALLS_AT_ONCE = 4
"""Calls that one guardian answers at a time: it waits for its agent's end, fetches a dataset, forgets one, and ends."""


def guardian(node: str, options: Mapping[str, Any]) -> Any:
    """Return a new actor on a node, in the ``runtime_env`` of the options, if any."""
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    environment = {name: value for name, value in options.items() if name == "runtime_env"}
    made = guardian_class().options(
        name=f"dpex-node-{os.getpid()}-{secrets.token_hex(4)}",
        num_cpus=0,
        max_restarts=0,
        max_concurrency=CALLS_AT_ONCE,
        scheduling_strategy=affinity(node, soft=False),
        **environment,
    )
    return made.remote()


def end(actor: Any) -> None:
    """End a guardian at once; harmless if it is gone, or Ray is."""
    with contextlib.suppress(Exception):
        importlib.import_module("ray").kill(actor, no_restart=True)


@cache
def guardian_class() -> Any:
    """Return the actor's class."""

    class DpexNode:
        def __init__(self) -> None:
            import os
            import threading

            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
            self._lock = threading.Lock()
            self._process: Any = None
            self._report = -1
            self._shipped: Any = None

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

        def start(self, address: tuple[Any, ...]) -> tuple[str, int, str]:
            """Start the agent's process, which connects to the trainer at that address (`TrainerAddress`). Return
            the node's name for people, this process's number, and why the agent cannot be started, or ""."""
            import os
            import pickle
            import socket
            import subprocess
            import sys

            import ray

            me = f"{socket.gethostname()} ({ray.get_runtime_context().get_node_id()[:8]})", os.getpid()
            try:
                import dpex.pools.agent.main  # noqa: F401
            except Exception as error:
                return *me, f"dpex cannot be imported there: {type(error).__name__}: {error}"
            read, write = os.pipe()
            self._report, report = os.pipe()
            code = "import sys; sys.path[:] = {!r}; from dpex.pools.agent.main import main; main({})"
            path = [entry for entry in sys.path if isinstance(entry, str)]
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-c", code.format(path, read)],
                    pass_fds=[read, report],
                    stdin=subprocess.DEVNULL,
                )
                with os.fdopen(write, "wb") as pipe:
                    pickle.dump((os.getpid(), address, report), pipe)
            finally:
                os.close(read)
                os.close(report)
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

        def __repr__(self) -> str:
            return "dpex node"

    return importlib.import_module("ray").remote(DpexNode)
