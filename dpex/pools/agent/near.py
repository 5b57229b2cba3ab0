"""An agent on the trainer's own machine: it gives the workers their place, and the trainer serves them itself.

The agent forks the process that forks the workers (see `dpex.pools.local.fork_server`), and hands that a socket of the
trainer's. From then on these workers are as those of a local pool: they take tickets from a socket that they share, and
hand over batches in shared memory, with no process in between. Their room, environment and life are the agent's: they
end with it, and it ends with its connection.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dpex.measure.batch_times import batch_times
from dpex.measure.pool_times import PoolTimes
from dpex.measure.sums import NodeStats, node_sums
from dpex.pools.agent.handles import AgentHandle
from dpex.pools.agent.link import AgentLink
from dpex.pools.local.fork_server import TemplateHandle, TemplateStarter
from dpex.pools.local.handles import LocalWorkerHandle, ProcessHandle
from dpex.pools.local.pool import LocalPool
from dpex.schedule.names import REMOTE
from dpex.system.run_queue import DelayMeter

_REQUESTS = {name: name for name in ("resize", "adopt", "ask_state")} | {"epoch": "new_epoch"}
"""Requests to an agent, and the methods of its pool that they call."""


class _AgentsProcess(ProcessHandle):
    """A process that the agent forks for the trainer. Its ``pid`` is known once it reports that it came up."""

    def __init__(self, why_not: str = "") -> None:
        super().__init__("dpex-template")
        self._why_not = why_not or "ended before it was ready (what it printed says more)"

    def came_up(self, pid: int) -> None:
        """Note that it came up."""
        self.pid = pid

    def why_not(self) -> str:
        """Return why it will not come up: the end of a sentence."""
        return self._why_not

    def close(self) -> None:
        """Do nothing: the agent reaps it."""


class AgentStarter(TemplateStarter):
    """Has templates started by an agent."""

    def __init__(self, link: AgentLink, order: tuple[Any, ...]) -> None:
        self._link = link
        self._order = order

    def start(self, theirs: Any) -> _AgentsProcess:
        """See `TemplateStarter.start`; does not wait."""
        try:
            self._link.hand_over(theirs.fileno(), "fork", self._order)
        except OSError as error:
            return _AgentsProcess(f"cannot be asked for: {error}")
        return _AgentsProcess()


class NearPool(LocalPool):
    """The workers of an agent on this machine.

    Args:
        first: The number of its first worker among those of all agents.
        times: What its batches took is added up there.
    """

    name = REMOTE

    def __init__(self, starter: AgentStarter, *, first: int, times: PoolTimes, shared_queue: bool) -> None:
        super().__init__(starter, shared_queue=shared_queue, first_workers=0)
        self.times = times
        self._first = first
        self._delay = DelayMeter()
        self._busy_s = self._cpu_s = 0.0
        self._made_here = 0

    def _result(self, worker: LocalWorkerHandle, *result: Any) -> None:
        times = batch_times(result[-1])
        self._made_here += 1
        self._busy_s += times.busy_s
        self._cpu_s += times.cpu_s
        self.times.shared_bytes += times.nbytes
        super()._result(worker, *result)

    def take_sums(self) -> NodeStats | None:
        """Return the sums since the last call; None: no batch was made."""
        if not self._made_here:
            return None
        found = node_sums(self._busy_s, self._cpu_s, self._made_here, self._delay.of(self.pids))
        self._busy_s, self._cpu_s, self._made_here = 0.0, 0.0, 0
        return found

    def out(self) -> tuple[int, ...]:
        """Return the tickets of this epoch that were sent and not answered."""
        if self._queue is not None:
            return tuple(ticket.number for tickets in self._queue.groups.values() for ticket in tickets)
        held = [key for worker in self._workers.values() for key in worker.held]
        return tuple(number for epoch, number in held if epoch == self._epoch)

    @property
    def open_messages(self) -> int:
        """Messages that any worker may take, which are not answered."""
        return len(self._queue.groups) if self._queue is not None else 0

    def leave(self, grace_s: float) -> None:
        """Close without waiting: the agent's processes see to the rest."""
        if not self._closed:
            self._hang_up_all(grace_s)
            assert isinstance(self._source, TemplateHandle)
            self._source.forget()
            self._release_resources()


@dataclass(eq=False, kw_only=True)
class NearAgentHandle(AgentHandle):
    """An agent of this machine; its ``pool`` does what the agent is asked for."""

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
