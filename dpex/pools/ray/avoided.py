"""Nodes that get no workers: some cannot serve the dataset, and some are left alone for a while as they failed."""

from __future__ import annotations

from collections.abc import Callable

from dpex.core.failing_nodes import LeftAlone
from dpex.pools.agent.nodes import NodeNews
from dpex.pools.ray.cluster import Cluster
from dpex.system.clock import monotonic


class AvoidedNodes:
    """Of one pool after the other; what is known of the nodes is the cluster's. ``tell``: the pool."""

    def __init__(self, cluster: Cluster, tell: Callable[[NodeNews], None]) -> None:
        self._cluster = cluster
        self._tell = tell
        self._kind = ""
        self._left_alone: dict[str, LeftAlone] = {}

    def begin(self, kind: str) -> None:
        """Serve a pool with such a dataset, which knows of none yet."""
        self._kind, self._left_alone = kind, {}

    def look(self) -> dict[str, str]:
        """Which they are now, and why; the pool is told of those that failed."""
        before, self._left_alone = self._left_alone, self._cluster.failing.left_alone(monotonic())
        for gone in [left for node, left in before.items() if node not in self._left_alone]:
            self._tell(NodeNews("left alone", place=gone.place))
        for left in [left for node, left in self._left_alone.items() if before.get(node) != left]:
            self._tell(NodeNews("left alone", place=left.place, why=left.why))
        unfit = {node: why for (node, kind), why in self._cluster.unfit.items() if kind == self._kind}
        return {**{node: left.why for node, left in self._left_alone.items()}, **unfit}

    def cannot_serve(self, node: str, why: str) -> None:
        """The dataset cannot be served there."""
        self._cluster.unfit[node, self._kind] = why

    def failed(self, node: str, place: str, why: str) -> str:
        """Something failed there; returns why the node is left alone from now on, "" if it is not."""
        left = self._cluster.failing.failed(node, place, why, monotonic())
        if left is None:
            return ""
        self._tell(NodeNews("notice", why=left.why))
        return left.why
