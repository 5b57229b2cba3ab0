"""An agent's connections to its trainer: the first one, and further ones where these carry more."""

from __future__ import annotations

import logging
import socket

from dpex.pools.agent.connection import TrainerAddress, connect_further
from dpex.pools.agent.frames import FrameWriter
from dpex.pools.agent.parallel import ConnectionCount
from dpex.pools.agent.traffic import Traffic
from dpex.pools.local.fork_server import keep_from_templates
from dpex.system.clock import monotonic

logger = logging.getLogger("dpex")


class Connections:
    """See the module. Further ones are never closed, as they are wanted again where a link changes.

    Args:
        first: The one that there is.
        trainer: Where further ones go; None where there cannot be any.
    """

    def __init__(self, first: socket.socket, trainer: TrainerAddress | None) -> None:
        self._first = first
        self._trainer = trainer if first.family != socket.AF_UNIX else None
        self._further: list[socket.socket] = []
        self._count = ConnectionCount()

    @property
    def all(self) -> list[socket.socket]:
        """All that were made."""
        return [self._first, *self._further]

    def look(self, traffic: Traffic, writer: FrameWriter) -> str | None:
        """Have ``writer`` use as many as carry most, judged by what was carried; returns what is to be told, if any."""
        trainer = self._trainer
        if trainer is None or (change := self._count.look(traffic, monotonic())) is None:
            return None
        if change.gained is not None:
            return (
                f"its batches travel over {change.extra} connections more, as one does not fill the link: they carry "
                f"{change.gained:.1f} times as much"
            )
        try:
            self._have(change.extra, trainer)
        except OSError as error:
            logger.info("no further connections can be made: %s", error)
            self._count.failed(monotonic())
            return None
        writer.spread(self._further[: change.extra])
        return None

    def _have(self, extra: int, trainer: TrainerAddress) -> None:
        if extra > len(self._further):
            made = connect_further(trainer, range(len(self._further) + 1, extra + 1))
            for connection in made:
                keep_from_templates(connection)
            self._further += made
