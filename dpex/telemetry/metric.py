"""What is declared of a metric. PURE."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpex.measure.record import Unit
from dpex.measure.sums import PoolSums, Sums
from dpex.telemetry.labels import Label

Kind = Literal["counter", "gauge", "histogram", "info"]
Group = Literal["consumer", "workers", "queue", "tuner", "gpu", "process"]


@dataclass(frozen=True, kw_only=True)
class Metric:
    """One metric. ``buckets`` are a histogram's upper bounds, without the infinite one."""

    name: str
    kind: Kind
    unit: Unit
    group: Group
    help: str
    how_to_read: str
    labels: tuple[Label, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def label_names(self) -> tuple[str, ...]:
        """In the order in which values are given."""
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> int:
        """Series there are at most for one loader or one GPU; a histogram's buckets count."""
        count = 1
        for label in self.labels:
            count *= len(label.values) or 1
        return count * (len(self.buckets) + 3 if self.kind == "histogram" else 1)


COUNTED = {
    one.metric: one.help
    for record in (Sums, PoolSums)
    for one in record.declared().values()
    if one.metric and not one.label and not one.stage
}
"""What `dpex.measure.sums` says of the metrics that export one field of it."""
