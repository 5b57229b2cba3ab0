"""Body of an agent's process, ``main(FD)``; a module of its own, as it connects before it imports torch.

FD is a pipe that names the trainer. Connecting takes milliseconds, and the trainer's first requests wait in the
connection while torch is imported.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket

from dpex.pools.agent.connection import TrainerAddress, connect
from dpex.system.interrupts import pidfd


def main(fd: int) -> None:
    """Connect to the trainer, and serve it until the connection or the guardian ends.

    The pipe holds three values: the guardian's process, the fields of a `TrainerAddress`, and the descriptor of a pipe
    for why the agent ended.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(fd, "rb") as pipe:
        guardian, address, report = pickle.load(pipe)
    guardian_fd = pidfd(guardian)
    if os.getppid() != guardian:
        os._exit(1)
    connection = _connection(TrainerAddress(*address), report)
    os.close(report)
    from dpex.pools.agent.serving import Agent
    from dpex.worker.setup import prepare_process

    prepare_process()
    Agent(connection, guardian_fd).run()


def _connection(trainer: TrainerAddress, report: int) -> socket.socket:
    try:
        return connect(trainer)
    except OSError as error:
        os.write(report, f"it cannot reach the trainer at {trainer.address}:{trainer.port}: {error}".encode())
        os._exit(1)
