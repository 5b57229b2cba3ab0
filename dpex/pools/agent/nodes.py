"""The protocol between a pool of remote workers and whatever provides machines: a cluster, or a test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

from dpex.pools.agent.link import AgentLink


class NodeNews(NamedTuple):
    """An event of an agent, or of all.

    kind: "ready": the agent can open a pool, over its ``link``, with what lies at ``path`` on its node, and must
    ``probe`` that first. "room": how many workers it may have has changed. "lost": it has ended; ``why``. "failed": no
    worker can be had at present, or ``for_good``; ``why``, "" where they can again. "notice": a message for people; a
    ``warning`` or a line in the log. "left alone": the node at ``place`` gets no workers for a while; ``why``, "" where
    it may again.
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
    """A source of agents. All calls come from the thread that drives the epoch, and none of them waits."""

    def begin(self, wake: Callable[[], None]) -> None:
        """Serve a pool; ``wake`` is called, from any thread, when there is news."""

    def want(self, workers: int, *, may_shrink: bool) -> None:
        """Reserve room for that many workers in all. Of more, what has no place yet goes; with ``may_shrink``, what has
        one goes too, once its worker has left."""

    def room(self, agent: int) -> int:
        """Return how many workers that agent may have now."""

    def runs(self, agent: int, workers: int) -> None:
        """Note how many of its workers run now, those that are to leave included."""

    def set_aside(self, agent: int, why: str) -> None:
        """Have no worker on its node any more, which cannot serve this dataset."""

    def cut_off(self, agent: int) -> None:
        """Note that its connection has ended."""

    def news(self) -> list[NodeNews]:
        """Return what happened since the last call."""

    def close(self) -> None:
        """Note that the pool needs no agent any more. Idempotent."""
