"""Makes links of the connections of agents that are let in: an agent's first one becomes its link, further ones widen
it."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

from dpex.pools.agent.admission import AdmissionServer
from dpex.pools.agent.connection import TrainerAddress, tune, whose
from dpex.pools.agent.handshake import ACCEPTED
from dpex.pools.agent.link import AgentLink


class LinkServer:
    """See the module.

    Args:
        address: Where agents reach this process.
        memory: See `AgentLink`.
        link_of: The link of the agent of that number; None where it has none, or is gone. Called in the server's
            thread.
        linked: Gets the number of an agent and its new link, in the server's thread.

    Raises:
        OSError: Nothing can listen on ``address``.
    """

    def __init__(
        self,
        address: str,
        memory: Callable[[int], Any],
        link_of: Callable[[int], AgentLink | None],
        linked: Callable[[int, AgentLink], None],
    ) -> None:
        self._memory = memory
        self._link_of = link_of
        self._linked = linked
        self._server = AdmissionServer(address, self._admit)

    def address_of(self, agent: int) -> TrainerAddress:
        """Where the agent of that number finds this process, and how it introduces itself."""
        server = self._server
        return TrainerAddress(server.address, server.port, server.secret, agent, server.local)

    def close(self) -> None:
        """Let nobody in any more. Idempotent; from any thread."""
        self._server.close()

    def _admit(self, connection: socket.socket, number: int) -> None:
        agent, further = whose(number)
        try:
            tune(connection, is_trainer=True)
            if further:
                self._widen(connection, agent, further)
                return
            connection.sendall(ACCEPTED)
            link = AgentLink(connection, self._memory, _nobody)
        except (OSError, RuntimeError):  # RuntimeError: there can be no further thread
            connection.close()
            return
        self._linked(agent, link)

    def _widen(self, connection: socket.socket, agent: int, further: int) -> None:
        """Give an agent's link a further connection before the agent may use it; none if the agent is gone."""
        link = self._link_of(agent)
        if link is None:
            connection.close()
            return
        link.widen(further, connection)
        connection.sendall(ACCEPTED)


def _nobody() -> None:
    """Nobody is to be woken until a pool says whom."""
