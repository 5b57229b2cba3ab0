"""Body of an agent's process: ``main(FD)``, where FD is a pipe that says whom to serve.

It connects first, which takes milliseconds, and imports torch afterwards: the trainer's first requests wait for it in
the connection.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
from typing import NamedTuple

from dpex.pools.agent.connection import TrainerAddress, connect
from dpex.system.processes import pidfd

UNREACHED = 3
"""Exit code of an agent that cannot reach its trainer; the report says why."""


class AgentStart(NamedTuple):
    """The arguments of an agent.

    guardian: the process with which it ends. address: the fields of a `TrainerAddress`, or None where ``tunnel`` is the
    descriptor of a socket that leads to the trainer. report: a pipe for why it ended.
    """

    guardian: int
    address: tuple[str, int, bytes, int] | None
    tunnel: int
    report: int


def main(fd: int) -> None:
    """Connect to the trainer, and serve it until the connection or the guardian ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(fd, "rb") as pipe:
        start = AgentStart(*pickle.load(pipe))
    guardian = pidfd(start.guardian)
    if os.getppid() != start.guardian:
        os._exit(1)
    connection = _connection(start)
    os.close(start.report)
    from dpex.pools.agent.serving import Agent
    from dpex.worker.setup import prepare_process

    prepare_process()
    Agent(connection, guardian).run()


def _connection(start: AgentStart) -> socket.socket:
    if start.address is None:
        return socket.socket(fileno=start.tunnel)
    trainer = TrainerAddress(*start.address)
    try:
        return connect(trainer)
    except OSError as error:
        os.write(start.report, f"{trainer.address}:{trainer.port}: {error}".encode())
        os._exit(UNREACHED)
