"""Where a pass over the data stands, by the batches that were delivered: what a later run goes on from. PURE."""

from __future__ import annotations

from dataclasses import dataclass, field

from dpex.core.first_stream import ALL
from dpex.core.logical_log import LogicalPoint


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """See the module.

    epoch: of the iterator, as persistent workers have several. first: the number of the next batch. ahead: batches
    after that one which were delivered before it, out of order. turn: the logical worker whose turn it is. logicals:
    how each of them stands; empty where any worker makes any ticket. streams: in how many streams an iterable dataset
    is read, as in `dpex.core.first_stream`; unless these are all, ``logicals`` holds the first alone. read: where the
    pass stands that this one draws from in place of a sampler, if it does.
    """

    epoch: int = 0
    first: int = 0
    ahead: frozenset[int] = field(default_factory=frozenset)
    turn: int = 0
    logicals: tuple[LogicalPoint, ...] = ()
    streams: int = ALL
    read: ResumePoint | None = None
