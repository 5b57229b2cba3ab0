"""Guardians: actors on the nodes of a cluster, from which the agents of all pools of this process are started.

A guardian fetches shipped datasets to its node, and runs an agent server (`dpex.pools.agent.agent_server`), which forks
the agents. Pools whose workers have the same ``runtime_env`` share the guardian of a node. It ends when the last pool
gives it back.

Importing this module imports neither Ray nor torch.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import pickle
import queue
import secrets
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Hashable, Mapping
from functools import cache
from typing import Any

CALLS_AT_ONCE = 8
"""Maximum concurrent calls of a guardian. One call waits for agents to end; the others come from its pools."""
LONGEST_TEXT = 400
"""Maximum characters shown of Ray's message, which begins with the event and continues with possible causes."""
Ended = Callable[[int, str], object]
"""A function that is called, in any thread, with an agent's exit code and the reason of its end, or ""."""


def reason_of(error: BaseException) -> str:
    """Return Ray's message about an actor's death in one line, with the type of the error at its end.

    For an error that was raised in the actor, the message is the text of that error. Lines that begin with a tab are
    left out, because they are fields of the actor.
    """
    task_error: Any = importlib.import_module("ray.exceptions").RayTaskError
    while isinstance(error, task_error) and isinstance(error.cause, BaseException):
        error = error.cause
    lines = [line for line in str(error).splitlines() if not line.startswith("\t")]
    text = textwrap.shorten(" ".join(lines), LONGEST_TEXT, placeholder=" …")
    return f"{text} [{type(error).__name__}]".lstrip()


class Guardian:
    """The trainer's handle of an actor on a node. Pools share it. Thread-safe.

    Attributes:
        actor: Ray's handle of the actor.
        uses: The number of pools that use the guardian.
    """

    def __init__(self, key: Hashable, actor: Any) -> None:
        self.key = key
        self.actor = actor
        self.uses = 0
        self._ended: dict[int, Ended] = {}
        self._is_watching = False
        self._lock = threading.Lock()

    def start(self, address: tuple[Any, ...], ended: Ended) -> Any:
        """Start an agent that connects to ``address``, the fields of a `TrainerAddress`; call ``ended`` when it ends.

        Return Ray's reference to the answer: the node's name, the guardian's pid, and why there is no agent or "".
        """
        with self._lock:
            self._ended[address[-1]] = ended
            is_first, self._is_watching = not self._is_watching, True
        answer = self.actor.start.remote(address)
        if is_first:
            self._watch()
        return answer

    def leave(self, agent: int) -> None:
        """Forget an agent, which nobody needs any more, and end it."""
        with self._lock:
            known = self._ended.pop(agent, None)
        if known is not None:
            self.stop(agent)

    def stop(self, agent: int) -> None:
        with contextlib.suppress(Exception):
            self.actor.stop.remote(agent)

    def _watch(self) -> None:
        self.actor.watch.remote().future().add_done_callback(self._heard)

    def _heard(self, future: Any) -> None:
        error = future.exception()
        ends: list[tuple[int, int, str]] = future.result() if error is None else []
        if error is not None:
            with self._lock:
                agents = list(self._ended)
            ends = [(agent, 1, f"its guardian ended: {reason_of(error)}") for agent in agents]
        for agent, code, why in ends:
            with self._lock:
                ended = self._ended.pop(agent, None)
            if ended is not None:
                ended(code, why)
        if error is None:
            with contextlib.suppress(Exception):  # Ray was shut down
                self._watch()


class Guardians:
    """The guardians of this process on a cluster. Thread-safe."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Guardian] = {}
        self._lock = threading.Lock()

    def take(self, node: str, options: Mapping[str, Any]) -> Guardian:
        """Return the guardian of a node for the ``runtime_env`` of these options. Start it if none runs."""
        environment = {name: value for name, value in options.items() if name == "runtime_env"}
        key = node, json.dumps(environment, sort_keys=True, default=repr)
        with self._lock:
            found = self._known.get(key)
            if found is None:
                found = self._known[key] = Guardian(key, _actor(node, environment))
            found.uses += 1
            return found

    def distrust(self, guardian: Guardian) -> bool:
        """Give a guardian to no further pool, because a call of it failed. Return False if that was done before."""
        with self._lock:
            if self._known.get(guardian.key) is guardian:
                del self._known[guardian.key]
                return True
            return False

    def give_back(self, guardian: Guardian) -> None:
        """End a guardian, and with it its agents, unless another pool uses it."""
        with self._lock:
            guardian.uses -= 1
            if guardian.uses:
                return
            if self._known.get(guardian.key) is guardian:
                del self._known[guardian.key]
        with contextlib.suppress(Exception):  # harmless if it is gone, or Ray is
            importlib.import_module("ray").kill(guardian.actor, no_restart=True)


def _actor(node: str, environment: Mapping[str, Any]) -> Any:
    affinity = importlib.import_module("ray.util.scheduling_strategies").NodeAffinitySchedulingStrategy
    made = guardian_class().options(
        name=f"dpex-node-{os.getpid()}-{secrets.token_hex(4)}",
        num_cpus=0,
        max_restarts=0,
        max_concurrency=CALLS_AT_ONCE,
        scheduling_strategy=affinity(node, soft=False),
        **environment,
    )
    return made.remote(serves=True)


@cache
def guardian_class() -> Any:
    return importlib.import_module("ray").remote(local_class())


def local_class() -> Any:  # noqa: C901  (the methods of its class count)
    """Return the class of the actor.

    The class is local, so Ray pickles it by value, and only its methods import dpex. So a node that lacks dpex can
    report that instead of failing. The actor does not import torch, but the agent server does, which has none of Ray's
    threads. The server watches the guardian, and ends with it. PR_SET_PDEATHSIG cannot do this, because its signal
    comes when the *thread* that started the process ends, and Ray's threads come and go.
    """

    class DpexNode:
        def __init__(self, *, serves: bool = False) -> None:
            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
            self._lock = threading.Lock()
            self._shipped: dict[int, int] = {}
            self._forgotten: set[int] = set()
            self._agents: set[int] = set()
            self._ends: Any = queue.SimpleQueue()
            self._server: Any = None
            if serves:
                self._serve()

        def ship(self, number: int, refs: list[Any]) -> str:
            """Fetch the parts of a dataset, and return where processes of this node can open them.

            Return "" if a call of `unship` has overtaken this one, so that the shipment is forgotten.
            """
            import ray

            from dpex.transport.memory import write_parts

            fd = write_parts(ray.get(refs[0]))
            with self._lock:
                if number in self._forgotten:
                    os.close(fd)
                    return ""
                self._shipped[number] = fd
            return f"/proc/{os.getpid()}/fd/{fd}"

        def unship(self, number: int) -> None:
            """Forget a shipment. Processes that have opened it can still read it."""
            with self._lock:
                self._forgotten.add(number)
                if (fd := self._shipped.pop(number, None)) is not None:
                    os.close(fd)

        def start(self, address: tuple[Any, ...]) -> tuple[str, int, str]:
            """Start an agent, which connects to the trainer at ``address`` (`TrainerAddress`). Return the displayed
            name of the node, the pid of this process, and why the agent cannot be started, or ""."""
            import ray

            me = f"{socket.gethostname()} ({ray.get_runtime_context().get_node_id()[:8]})", os.getpid()
            try:
                import dpex.pools.agent.connection  # noqa: F401
            except Exception as error:
                return *me, f"dpex cannot be imported there: {type(error).__name__}: {error}"
            self._ask("start", address, address[-1])
            return *me, ""

        def stop(self, agent: int) -> None:
            if agent in self._agents:
                self._ask("stop", agent)

        def watch(self) -> list[tuple[int, int, str]]:
            """Wait until agents have ended; return the number, exit code and reason of each."""
            ends = [self._ends.get()]
            while not self._ends.empty():
                ends.append(self._ends.get())
            return ends

        def _ask(self, what: str, about: Any, agent: int | None = None) -> None:
            """Send a request to the agent server, which is started anew if it has ended."""
            with self._lock:
                if self._server is None:
                    self._serve()
                if agent is not None:
                    self._agents.add(agent)
                with contextlib.suppress(OSError):  # the server has just ended, and its agents with it
                    self._server.send(pickle.dumps((what, about)))

        def _serve(self) -> None:
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            code = "import sys; sys.path[:] = {!r}; from dpex.pools.agent.agent_server import main; main({}, {})"
            path = [entry for entry in sys.path if isinstance(entry, str)]
            command = [sys.executable, "-c", code.format(path, theirs.fileno(), os.getpid())]
            with theirs:
                process = subprocess.Popen(command, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
            self._server = ours
            threading.Thread(target=self._read, args=(ours, process), name="dpex-agents", daemon=True).start()

        def _read(self, server: socket.socket, process: Any) -> None:
            """Read the reports of the agent server until it and its agents end."""
            reasons: dict[int, str] = {}
            with server:
                while data := self._received(server):
                    what, agent, found = pickle.loads(data)
                    if what == "why":
                        reasons[agent] = found
                    else:
                        self._agents.discard(agent)
                        self._ends.put((agent, found, reasons.pop(agent, "")))
                code = int(process.wait())
                with self._lock:
                    self._server, agents, self._agents = None, self._agents, set()
            for agent in agents:
                self._ends.put((agent, code, reasons.pop(agent, "")))

        def _received(self, server: socket.socket) -> bytes:
            with contextlib.suppress(ConnectionResetError):
                return server.recv(1 << 16)
            return b""

        def __repr__(self) -> str:
            return "dpex node"

    return DpexNode
