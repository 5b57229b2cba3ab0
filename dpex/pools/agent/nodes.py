"""What a pool of remote workers needs of whatever gives it machines: the cluster, or a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from dpex.pools.agent.link import AgentLink


class NodeNews(NamedTuple):
    """What became of an agent, or of all.

    kind: "ready": the agent can be told to open a pool, over its ``link``, with what lies at ``path`` on its node, and
    must ``probe`` that first. "room": how many workers it may have has changed. "lost": it has ended, for the reason
    ``why``. "failed": no worker can be had at present for that reason, or ``for_good``; "" means that they can again.
    "notice": somebody should know. "left alone": the node at ``place`` gets no workers for a while, for the reason
    ``why``; "" means that it may again.
    """

    kind: Literal["ready", "room", "lost", "failed", "notice", "left alone"]
    agent: int = -1
    place: str = ""
    link: AgentLink | None = None
    path: str = ""
    probe: bool = False
    why: str = ""
    warning: bool = True
    for_good: bool = False


class Nodes(Protocol):
    """Where agents come from. All calls come from the thread that drives the epoch, and none of them waits."""

    def begin(self, wake: Callable[[], None]) -> None:
        """Serve a pool; ``wake`` is called, from any thread, when there is news."""

    def want(self, workers: int, *, may_shrink: bool) -> None:
        """Reserve room for that many workers in all. If there is more, what has no place yet goes; and, if it
        ``may_shrink``, what has one, once its worker has left."""

    def room(self, agent: int) -> int:
        """How many workers that agent may have now."""

    def give_back(self, agent: int) -> None:
        """One of its workers is to leave, and not to be replaced."""

    def runs(self, agent: int, workers: int) -> None:
        """So many of its workers run now, those that are to leave included."""

    def set_aside(self, agent: int, why: str) -> None:
        """Its node cannot serve this dataset; nobody goes there any more."""

    def cut_off(self, agent: int) -> None:
        """Its connection has ended."""

    def news(self) -> list[NodeNews]:
        """What happened since the last call."""

    def close(self) -> None:
        """The pool needs nobody any more. Idempotent."""
