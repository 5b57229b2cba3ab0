"""The declaration of a metric and of its labels. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from dpex.measure.record import Unit
from dpex.measure.sums import PoolSums, Sums

Kind = Literal["counter", "gauge", "histogram", "info"]
Group = Literal["consumer", "workers", "queue", "tuner", "gpu", "process"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label's name and its possible values. Without ``values`` it is open, with at most ``most`` at a time."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 1
    help: str = ""


COUNTED = {
    one.metric: one.help
    for record in (Sums, PoolSums)
    for one in record.declared().values()
    if one.metric and not one.label and not one.stage
}
"""Help of the metrics that export one field of `dpex.measure.sums`."""


@dataclass(frozen=True)
class Metric:
    """A metric; its kind and unit follow from its name, as Prometheus's conventions want it.

    Attributes:
        how_to_read: What its values mean to the user.
        help: What is measured; by default the help of the field that it exports.
        buckets: A histogram's upper bounds, without the infinite one.
    """

    name: str
    labels: tuple[Label, ...]
    how_to_read: str
    help: str = ""
    buckets: tuple[float, ...] = ()
    group: Group = "process"

    @property
    def kind(self) -> Kind:
        """Return the kind of metric."""
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "info" if self.name.endswith("_info") else "gauge"

    @property
    def unit(self) -> Unit:
        """Return the unit, with which the name ends; "" for a number of things."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in get_args(Unit) if unit and stem.endswith(f"_{unit}")), "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the labels, in the order of their values in a key."""
        return tuple(label.name for label in self.labels)

    @property
    def series(self) -> int:
        """Return the largest number of series for one loader or GPU, a histogram's buckets included."""
        each = len(self.buckets) + 3 if self.buckets else 1
        return each * math.prod(len(label.values) or 1 for label in self.labels)
