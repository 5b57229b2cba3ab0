"""Whether a trainer and an agent compress what travels, and what is said, once, where only one of them can.

The trainer says with its order for a pool that it takes compressed buffers; without Zstandard, or with
``DPEX_COMPRESSION=0``, it sends the order of a pool that knows of no compression. An agent that finds Zstandard at one
end only tells which.
"""

from __future__ import annotations

import os
from typing import Any

from dpex.pools.agent.link import AgentLink
from dpex.transport.compression import can_compress

SWITCH = "DPEX_COMPRESSION"
"""Environment variable of the trainer; "0": nothing is compressed."""
REMEDY = "pip install 'dpex[compression]'"
_said: set[bool] = set()
"""What this process has said already: whether it was Zstandard here that was missing."""


def is_wanted() -> bool:
    """Whether this trainer takes compressed buffers."""
    return os.environ.get(SWITCH, "") != "0" and can_compress()


def order_for(link: AgentLink, order: tuple[Any, ...]) -> tuple[Any, ...]:
    """The order for a pool of an agent, which compresses for a connection of its own only: of one through Ray nobody
    knows what it carries."""
    return (*order, True) if is_wanted() and not link.is_tunnel else order


def told_by(place: str, *, is_installed_there: bool) -> str | None:
    """What is to be said once an agent found Zstandard at one end only; None if that was said, or is as wanted."""
    is_missing_here = is_installed_there and not can_compress()
    if is_missing_here in _said or (is_installed_there and not is_missing_here):
        return None
    _said.add(is_missing_here)
    where = f"on this machine, though it is on node {place}" if is_missing_here else f"on node {place}"
    return f"zstandard is not installed {where}: batches come from there uncompressed ({REMEDY} for both)"
