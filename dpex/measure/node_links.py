"""The ways from the machines of a cluster, from what was counted of them. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from dpex.measure.sums import NodeSums
from dpex.schedule.room import NodeLink


def node_links(before: Mapping[str, NodeSums], after: Mapping[str, NodeSums], seconds: float) -> dict[str, NodeLink]:
    """The ways that are measured, between two looks at the machines."""
    return {
        place: NodeLink(
            (now.sent_bytes - before[place].sent_bytes if place in before else now.sent_bytes) / seconds,
            now.bandwidth or 0.0,
            now.round_trip_s,
            now.loss,
        )
        for place, now in after.items()
        if now.links and seconds > 0
    }
