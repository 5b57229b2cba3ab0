"""An agent on the trainer's own machine: it gives the workers their place, and the trainer serves them itself.

The agent forks the process that forks the workers (see `dpex.pools.local.fork_server`), and that gets a socket of the
trainer's. From then on these workers are as those of a local pool: they take tickets from a socket that they share,
and hand over batches in shared memory, with nobody in between. Their room, their surroundings and their life are the
agent's: they end with it, and it with its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpex.core.names import REMOTE
from dpex.measure.sums import NodeSums
from dpex.pools.agent.delay import DelayMeter
from dpex.pools.agent.handles import AgentHandle, node_sums
from dpex.pools.agent.link import AgentLink
from dpex.pools.base import PoolTimes
from dpex.pools.local.fork_server import TemplateHandle, TemplateStarter
from dpex.pools.local.handles import LocalWorkerHandle, ProcessHandle
from dpex.pools.local.pool import LocalPool

_REQUESTS = {name: name for name in ("resize", "adopt", "ask_state")} | {"epoch": "new_epoch"}
"""What an agent is asked for, and what its pool calls that."""


class LentProcess(ProcessHandle):
    """A process that the agent forks for the trainer; its ``pid`` is None until it says that it came up."""

    def __init__(self, why_not: str = "") -> None:
        super().__init__("dpex-template")
        self._why_not = why_not or "ended before it was ready (what it printed says more)"

    def came_up(self, pid: int) -> None:
        """It said so."""
        self.pid = pid

    def why_not(self) -> str:
        """Why it will not come up: the end of a sentence."""
        return self._why_not

    def close(self) -> None:
        """Nothing is wanted of it any more."""


class AgentStarter(TemplateStarter):
    """Has templates started by an agent."""

    def __init__(self, link: AgentLink, order: tuple[Any, ...]) -> None:
        self._link = link
        self._order = order

    def start(self, theirs: Any) -> LentProcess:
        """See `TemplateStarter.start`; does not wait."""
        try:
            self._link.hand_over(theirs.fileno(), "lend", self._order)
        except OSError as error:
            return LentProcess(f"cannot be asked for: {error}")
        return LentProcess()


class NearPool(LocalPool):
    """The workers of an agent on this machine.

    Args:
        first: number of its first worker among those of all agents.
        times: what batches took is added up there.
    """

    name = REMOTE

    def __init__(self, starter: AgentStarter, *, first: int, times: PoolTimes, shared_queue: bool) -> None:
        super().__init__(starter, shared_queue=shared_queue, first_workers=0)
        self.times = times
        self._first = first
        self._delay = DelayMeter()
        self._busy_s = self._cpu_s = 0.0
        self._made_here = 0

    def _result(
        self,
        worker: LocalWorkerHandle,
        epoch: int,
        number: int,
        kind: int,
        node: Any,
        stages: tuple[Any, ...],
        cpu_s: float,
        encode_s: float,
        nbytes: int,
    ) -> None:
        self._made_here += 1
        self._busy_s += stages[0] + stages[1] + encode_s
        self._cpu_s += cpu_s
        self.times.shared_bytes += nbytes
        super()._result(worker, epoch, number, kind, node, stages, cpu_s, encode_s, nbytes)

    def take_sums(self) -> NodeSums | None:
        """What was made since the last call."""
        if not self._made_here:
            return None
        found = node_sums(self._busy_s, self._cpu_s, self._made_here, self._delay.of(self.handles))
        self._busy_s, self._cpu_s, self._made_here = 0.0, 0.0, 0
        return found

    def out(self) -> tuple[int, ...]:
        """Tickets of this epoch that were sent and not answered."""
        if self._queue is not None:
            return tuple(ticket.number for tickets in self._queue.groups.values() for ticket in tickets)
        held = [key for worker in self._workers.values() for key in worker.held]
        return tuple(number for epoch, number in held if epoch == self._epoch)

    @property
    def open_messages(self) -> int:
        """Messages that any worker may take, which are not done with."""
        return len(self._queue.groups) if self._queue is not None else 0

    def leave(self, grace_s: float) -> None:
        """As `close`, without waiting: the agent's processes see to the rest."""
        if not self._closed:
            self._hang_up_all(grace_s)
            assert isinstance(self._source, TemplateHandle)
            self._source.forget()
            self._release_resources()


@dataclass(eq=False, kw_only=True)
class NearAgentHandle(AgentHandle):
    """An agent of this machine; what is asked of it, its ``pool`` does."""

    pool: NearPool

    def put(self, *header: Any) -> bool:
        """See `AgentHandle.put`."""
        what, *arguments = header
        if what == "close":
            self.pool.leave(*arguments)
        else:
            getattr(self.pool, _REQUESTS[what])(*arguments)
        return True

    @property
    def open_messages(self) -> int:
        """See `AgentHandle.open_messages`."""
        return self.pool.open_messages

    def out(self) -> Sequence[int]:
        """See `AgentHandle.out`."""
        return self.pool.out()
