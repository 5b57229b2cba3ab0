"""The exported metrics. Code, dashboards, rules and documentation are made from this list or checked against it.

A metric that exports one field of `dpex.measure.reading` is declared with that field. This module declares metrics
that are calculated at each scrape, and metrics that export several fields, one per series.

Names follow Prometheus's rules (prometheus.io/docs/practices/naming): one prefix, one unit and one quantity per metric,
base units, ratios from 0 to 1, and ``_total`` for what accumulates. The sum or the average over all labels of a metric
is meaningful. Labels have few values, listed here or limited by `Label.most`; none names a worker, a process, an epoch
or a file. The labels of the scrape target name the job, rank and node (see `dpex.telemetry.discovery`).

``docs/metrics.md`` lists the metrics; `dashboards.pages` writes the list.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, get_args

from dpex.measure.causes import TIMED
from dpex.measure.pool_reading import LINK, STAGES, PoolReading
from dpex.measure.reading import Reading
from dpex.measure.record import Record, Unit
from dpex.measure.settings import KNOBS, POOLS, REMOTE, WORKER_POOLS

Kind = Literal["counter", "gauge", "histogram", "info"]
Group = Literal["consumer", "workers", "network", "tuner", "gpu", "process"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label's name and its possible values. If ``values`` is empty, it has any values, at most ``most`` at a time."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 1
    help: str = ""


@dataclass(frozen=True)
class Metric:
    """A metric. By Prometheus's conventions, its name determines its kind and its unit.

    Attributes:
        labels: The labels, in the order of their values in a key.
        how_to_read: The meaning of the values.
        help: The measured quantity.
        buckets: The finite upper bounds of a histogram.
        group: The section in ``docs/metrics.md``.
    """

    group: Group
    name: str
    labels: tuple[Label, ...]
    how_to_read: str
    help: str
    buckets: tuple[float, ...] = ()

    @property
    def kind(self) -> Kind:
        if self.buckets:
            return "histogram"
        return "counter" if self.name.endswith("_total") else "info" if self.name.endswith("_info") else "gauge"

    @property
    def unit(self) -> Unit:
        """Return the unit, which is the suffix of the name; "" for a count."""
        stem = self.name.removesuffix("_total")
        return next((unit for unit in get_args(Unit) if unit and stem.endswith(f"_{unit}")), "")

    @property
    def label_names(self) -> tuple[str, ...]:
        """Return the names of the labels, in the order of their values in a key."""
        return tuple(label.name for label in self.labels)


# -- labels ------------------------------------------------------------------------------------------------------------

STATES = ("wait", "transfer", "work")
PATHS = ("shm", "network", "h2d", "device")
PARTS = ("copy", "transform", "wait")
ERRORS = ("batch", "worker", "timeout")
OTHERS = "others"

LOADER = Label(name="loader", most=4, help='the loader\'s `name=`, else "loader-1" and so on')
STATE = Label(name="state", values=STATES, help="exclusive; all three together are the wall time of all epochs")
CAUSE = Label(
    name="cause",
    values=TIMED,
    help='exclusive; all of them together are `state="wait"`; of loading, `read` is the part that waits and '
    "`transform` the part that computes",
)
POOL = Label(name="pool", values=POOLS, help="where batches are made: the training process, this machine, the cluster")
WORKER_POOL = Label(name="pool", values=WORKER_POOLS, help="where workers are: this machine, the cluster")
CLUSTER = Label(name="pool", values=(REMOTE,), help="the cluster, which alone sends batches over a network")
MACHINE = Label(name="machine", most=9, help=f'a machine of the cluster, from the ninth on "{OTHERS}"')
STAGE = Label(name="stage", values=STAGES, help="`dataset[i]`; the collate function; writing the batch into a slot")
PATH = Label(name="path", values=PATHS, help="shared memory, connection, page-locked memory, device")
PART = Label(name="part", values=PARTS, help="copies; the device transform; the training stream waiting for them")
ERROR = Label(name="kind", values=ERRORS, help="user's code failed, workers were lost, `timeout=`")
KNOB = Label(name="knob", values=KNOBS, help="workers here, workers on the cluster, prefetch")
DIRECTION = Label(name="direction", values=("up", "down"))
GPU = Label(name="gpu", most=8, help="the GPU's UUID")

# -- metrics of one field ----------------------------------------------------------------------------------------------

_BY_NAME = {"causes": CAUSE, "moved_bytes": PATH, "errors": ERROR}
"""The label of each field that is a mapping. The keys of the mapping are values of the label."""
_OTHER_POOLS = {
    "services": POOL,
    "nodes_excluded": CLUSTER,
    **dict.fromkeys(("cache_hits", "cache_misses", "cache_saved_s"), POOL),
}
"""The pool label by field, for fields that are not measured in exactly the `WORKER_POOLS`."""


def _declared(record: type[Record]) -> Iterator[Metric]:
    """Return the metrics of a record's fields. Each has labels for the loader, and the pool or machine."""
    for field, one in record.declared().items():
        if not one.how_to_read:
            continue
        group: Group = "consumer" if record is Reading else "network" if field in LINK else "workers"
        labels = {"consumer": (), "network": (CLUSTER, MACHINE), "workers": (_OTHER_POOLS.get(field, WORKER_POOL),)}
        inner = (_BY_NAME[field],) if field in _BY_NAME else ()
        yield Metric(group, one.metric, (LOADER, *labels[group], *inner), one.how_to_read, one.help, one.buckets)


# -- metrics of several fields, and calculated metrics -----------------------------------------------------------------

# Group, name and labels, how to read it, and the measured quantity.
# fmt: off
_OTHERS: tuple[Metric, ...] = (
    Metric("consumer", "dpex_consumer_seconds_total", (LOADER, STATE),
        "The share of `wait`: under 5 % loading is not the bottleneck, over 20 % it is.",
        "Wall time of the training loop: waiting for a batch, receiving it, or working."),
    Metric("consumer", "dpex_last_batch_timestamp_seconds", (LOADER,),
        "`time() - dpex_last_batch_timestamp_seconds` grows while training is stuck, or busy with something else.",
        "Unix time at which the latest batch was delivered."),
    Metric("consumer", "dpex_device_feed_seconds_total", (LOADER, PART),
        "`wait` near 0: copies and transforms overlap with training. If `wait` grows, reduce the larger of `copy` "
        "(by `uint8` until the device) and `transform` (by less work in the transform of `DeviceConfig`).",
        "Seconds in which the device copied or transformed batches of a loader with `device=`, or waited for them."),
    Metric("workers", "dpex_worker_seconds_total", (LOADER, POOL, STAGE),
        "Over dpex_worker_batch_seconds_count: what a batch costs; over dpex_workers_running: use.",
        "Wall time spent making batches, by stage, over all workers of a pool."),
    Metric("workers", "dpex_worker_cpu_seconds_total", (LOADER, POOL, STAGE),
        "Over dpex_worker_seconds_total: near 1 computes, under 0.5 waits for storage or a CPU.",
        "CPU time of the threads that make batches, by stage, over all workers of a pool."),
    Metric("tuner", "dpex_tuner_decisions_total", (LOADER, KNOB, DIRECTION),
        "Many at first and few later is normal. Permanent ups and downs mean a load that keeps changing.",
        "Changes of settings by the tuner, by setting and direction."),
    Metric("tuner", "dpex_tuner_undone_total", (LOADER,),
        "A few are normal, because the tuner finds the limit so; over half of all decisions mean a noisy machine.",
        "Decisions taken back because they did not bring what they should."),
    Metric("tuner", "dpex_tuner_predicted_wait_ratio", (LOADER,),
        "If it is close to dpex_tuner_measured_wait_ratio, the tuner's model fits.",
        "Share of wall time that the training loop should wait after the latest decision that was judged."),
    Metric("tuner", "dpex_tuner_measured_wait_ratio", (LOADER,),
        "What the decision brought; see dpex_tuner_predicted_wait_ratio.",
        "Share of wall time that the training loop did wait after the latest decision that was judged."),
    Metric("tuner", "dpex_tuner_predicted_batches_per_second", (LOADER,),
        "Compare with dpex_tuner_measured_batches_per_second.",
        "Batches per second that the training loop should get after the latest decision that was judged."),
    Metric("tuner", "dpex_tuner_measured_batches_per_second", (LOADER,),
        "Compare with dpex_tuner_predicted_batches_per_second.",
        "Batches per second that the training loop did get after the latest decision that was judged."),
    Metric("gpu", "dpex_gpu_kernel_active_ratio", (GPU,),
        "Low is bad, but high is not yet good: one busy multiprocessor of many counts as 1. NVIDIA's DCGM exporter "
        "has the share of the multiprocessors.",
        "Share of time in which at least one kernel ran (NVML utilisation)."),
    Metric("gpu", "dpex_gpu_memory_used_bytes", (GPU,),
        "Over dpex_gpu_memory_size_bytes: how full the device is.",
        "Device memory in use, that of other processes included."),
    Metric("gpu", "dpex_gpu_memory_size_bytes", (GPU,),
        "The capacity behind dpex_gpu_memory_used_bytes.",
        "Size of the device memory."),
    Metric("gpu", "dpex_gpu_info", (GPU, Label(name="index", help="the driver's number"), Label(name="model")),
        "Join it to other GPU metrics by `gpu` to show a name.",
        "Index and model of a GPU; always 1."),
    Metric("process", "dpex_build_info", (Label(name="version"), Label(name="python"), Label(name="torch")),
        "Distinguishes runs with different software.",
        "Versions in the training process; always 1."),
    Metric("process", "dpex_loader_info",
        (LOADER, Label(name="dataset", help="its class"), Label(name="batch_size"), Label(name="seeding")),
        "Join it to other metrics by `loader`.",
        "Dataset and settings of a loader; always 1."),
)
# fmt: on

METRICS = (*_declared(Reading), *_declared(PoolReading), *_OTHERS)
BY_NAME = {metric.name: metric for metric in METRICS}
