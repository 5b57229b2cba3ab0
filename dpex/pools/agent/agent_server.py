"""The agent server: a process on a node that forks the agents, so that only the first agent waits for imports.

Importing torch takes most of the time until a first remote batch. The guardian, dpex's Ray actor on the node, starts
the server once, as its child. The server then forks an agent for each pool of the trainer, within milliseconds.

The guardian sends ``("start", fields)`` of a `dpex.pools.agent.connection.TrainerAddress`, and ``("stop", agent)``.
The server answers ``("ended", agent, exit code)``. An agent that cannot begin sends ``("why", agent, text)`` before it
ends.

The server has one thread. It ends when the socket closes, or when a pidfd shows that the guardian has ended. Agents
watch the guardian, too. If the server dies first, the kernel kills its agents (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import gc
import os
import pickle
import select
import signal
import socket
from functools import partial
from multiprocessing import current_process

from dpex.pools.agent.connection import TrainerAddress, connect
from dpex.system.processes import pidfd

MESSAGE_BYTES = 1 << 16
"""Maximum bytes of a message on the socket, which holds an address or a reason."""
_LOOK_MS = 1000
"""Milliseconds between two checks for ended agents on a system without pidfds."""
_LAST_S = 5.0
"""Seconds for which the server waits for an agent to end, once the guardian has ended."""


def main(fd: int, guardian: int) -> None:
    """Body of the server's process. ``fd``: its socket. ``guardian``: the pid of the process that started it.

    The garbage collector is off during the imports, which saves a twelfth of their time.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    guardian_fd = pidfd(guardian)
    if os.getppid() != guardian:
        os._exit(1)
    gc.disable()
    import dpex.pools.agent.serving  # noqa: F401  (the agents' code, and torch)
    from dpex.worker.setup import prepare_process

    prepare_process()
    gc.enable()
    gc.freeze()
    AgentServer(socket.socket(fileno=fd), guardian_fd).run()


class AgentServer:
    """Forks agents on requests from the socket ``guardian``. ``guardian_fd``: the guardian's pidfd, or -1."""

    def __init__(self, guardian: socket.socket, guardian_fd: int) -> None:
        self._guardian = guardian
        self._guardian_fd = guardian_fd
        self._agents: dict[int, int] = {}
        """The pid of each agent, by the agent's number."""
        self._ends: dict[int, int] = {}
        """The pidfd of each agent, or -1, by its pid."""

    def run(self) -> None:
        """Serve until the guardian ends."""
        while self._guardian_fd not in (ready := self._wait(_LOOK_MS)):
            if self._guardian.fileno() in ready and not self._obey():
                break
            self._reap()
        while self._agents and self._wait(int(_LAST_S * 1000), of_agents=True):
            self._reap()

    def _wait(self, timeout_ms: int, *, of_agents: bool = False) -> set[int]:
        poller = select.poll()
        others = () if of_agents else (self._guardian.fileno(), self._guardian_fd)
        for fd in (*others, *self._ends.values()):
            if fd >= 0:
                poller.register(fd, select.POLLIN)
        return {fd for fd, _ in poller.poll(timeout_ms)}

    def _obey(self) -> bool:
        """Carry out one request; return False if the guardian is gone."""
        try:
            data = self._guardian.recv(MESSAGE_BYTES)
        except ConnectionResetError:
            return False
        if not data:
            return False
        what, about = pickle.loads(data)
        if what == "start":
            self._start(TrainerAddress(*about))
        elif about in self._agents:
            os.kill(self._agents[about], signal.SIGKILL)
        return True

    def _start(self, trainer: TrainerAddress) -> None:
        from dpex.pools.local import forking

        try:
            pid = forking.fork_process(partial(self._enter, os.getpid(), trainer), forking.helper("dpex-agent"))
        except OSError as error:
            self._tell("why", trainer.agent, f"it cannot be forked: {error}")
            self._tell("ended", trainer.agent, 1)
            return
        self._agents[trainer.agent] = pid
        self._ends[pid] = pidfd(pid)

    def _reap(self) -> None:
        for agent, pid in list(self._agents.items()):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                del self._agents[agent]
                if (fd := self._ends.pop(pid)) >= 0:
                    os.close(fd)
                self._tell("ended", agent, os.waitstatus_to_exitcode(status))

    def _tell(self, *message: object) -> None:
        try:
            self._guardian.send(pickle.dumps(message))
        except OSError:
            return  # the guardian has ended, as its descriptor shows

    def _enter(self, server: int, trainer: TrainerAddress) -> None:
        """Body of an agent: connect to the trainer, and serve it until the connection or the guardian ends."""
        from dpex.pools.agent.serving import Agent
        from dpex.pools.local import forking

        forking.die_with_parent(server)
        current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # agents have child processes
        for fd in self._ends.values():
            if fd >= 0:
                os.close(fd)
        try:
            connection = connect(trainer)
        except OSError as error:
            why = f"it cannot reach the trainer at {trainer.address}:{trainer.port}: {error}"
            self._tell("why", trainer.agent, why)
            os._exit(1)
        self._guardian.close()
        Agent(connection, self._guardian_fd).run()
