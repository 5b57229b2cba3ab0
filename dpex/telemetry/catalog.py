"""Every metric dpex exports, once: code, dashboards, rules and documentation are made from this or checked against it.

Names follow Prometheus's rules (prometheus.io/docs/practices/naming): one prefix, one unit and one quantity per metric,
base units, ratios from 0 to 1, ``_total`` behind what accumulates, and ``sum()`` or ``avg()`` over all labels of a
metric means something. Labels have few values, known here; none names a worker, a process, an epoch or a file. Which
job, rank and node a series comes from is said by the labels of its scrape target (see `dpex.telemetry.discovery`).

``docs/metrics.md`` is made from it by `dpex.telemetry.markdown`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from dpex.measure.consumer_time import STEP_BUCKETS, WAIT_BUCKETS
from dpex.measure.stall_causes import CAUSES

Kind = Literal["counter", "gauge", "histogram", "info"]
Unit = Literal["", "seconds", "bytes", "ratio", "batches_per_second"]
"""Nothing: a number of things, which the name says."""
Group = Literal["consumer", "workers", "queue", "tuner", "gpu", "process"]


@dataclass(frozen=True, kw_only=True)
class Label:
    """A label's name, and the values it may have; without ``values`` it is open, with ``most`` of them at a time."""

    name: str
    values: tuple[str, ...] = ()
    most: int = 1
    help: str = ""


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


STATES = ("wait", "transfer", "work")
LANES = ("inline", "local", "remote")
STAGES = ("load", "collate", "serialize")
PATHS = ("shm", "network", "object_store", "h2d")

LOADER = Label(name="loader", most=4, help='the loader\'s `name=`, else "loader-1" and so on')
STATE = Label(name="state", values=STATES, help="exclusive; all three together are the wall time of all passes")
CAUSE = Label(name="cause", values=CAUSES, help='exclusive; all of them together are `state="wait"`')
LANE = Label(name="lane", values=LANES, help="where batches are made: the training process, this machine, the cluster")
HOSTS = Label(name="lane", values=LANES[1:], help="where workers are: this machine, the cluster")
STAGE = Label(name="stage", values=STAGES, help="`dataset[i]`; the collate function; writing the batch into a slot")
PATH = Label(name="path", values=PATHS, help="shared memory, a connection, Ray's object store, page-locked memory")
ERROR = Label(
    name="kind", values=("batch", "worker", "timeout"), help="user's code failed, workers were lost, `timeout=`"
)
KNOB = Label(name="knob", values=("local", "remote", "depth"), help="workers here, workers on the cluster, look-ahead")
DIRECTION = Label(name="direction", values=("up", "down"))
GPU = Label(name="gpu", most=8, help="the GPU's UUID")
BUS = Label(name="direction", values=("rx", "tx"), help="rx: to the GPU, tx: from it")
COLLECTOR = Label(name="collector", values=("loaders", "gpu"))

METRICS: tuple[Metric, ...] = (
    # -- consumer ----------------------------------------------------------------------------------------------------
    Metric(
        name="dpex_consumer_seconds_total",
        kind="counter",
        unit="seconds",
        group="consumer",
        labels=(LOADER, STATE),
        help="Wall time of the training loop, by what it was doing: waiting for a batch, taking it in, or working.",
        how_to_read="Share of `wait` in all states: under 5 % loading is not the bottleneck, over 20 % it is.",
    ),
    Metric(
        name="dpex_stall_seconds_total",
        kind="counter",
        unit="seconds",
        group="consumer",
        labels=(LOADER, CAUSE),
        help='Waiting time of the training loop, by cause; adds up to dpex_consumer_seconds_total{state="wait"}.',
        how_to_read="The largest cause is what to work on: its rate is the share of wall time that it costs.",
    ),
    Metric(
        name="dpex_batches_total",
        kind="counter",
        unit="",
        group="consumer",
        labels=(LOADER,),
        help="Batches delivered to the training loop.",
        how_to_read="Its rate is the training loop's speed; a rate of 0 between epochs is normal.",
    ),
    Metric(
        name="dpex_samples_total",
        kind="counter",
        unit="",
        group="consumer",
        labels=(LOADER,),
        help="Samples in the batches delivered.",
        how_to_read="Its rate is comparable between runs of different batch sizes.",
    ),
    Metric(
        name="dpex_batch_wait_seconds",
        kind="histogram",
        unit="seconds",
        group="consumer",
        labels=(LOADER,),
        buckets=WAIT_BUCKETS,
        help="Waiting time of one batch, the first of each pass left out.",
        how_to_read="A median near 0 with a long tail means stragglers; everything shifted up, too little throughput.",
    ),
    Metric(
        name="dpex_step_seconds",
        kind="histogram",
        unit="seconds",
        group="consumer",
        labels=(LOADER,),
        buckets=STEP_BUCKETS,
        help="Host time of the training loop between two batches.",
        how_to_read="What a batch may take if nobody is to wait; with a GPU the host may run ahead of the device.",
    ),
    Metric(
        name="dpex_last_batch_timestamp_seconds",
        kind="gauge",
        unit="seconds",
        group="consumer",
        labels=(LOADER,),
        help="Unix time at which the latest batch was delivered.",
        how_to_read="`time() - dpex_last_batch_timestamp_seconds` grows while training is stuck, or at something else.",
    ),
    Metric(
        name="dpex_errors_total",
        kind="counter",
        unit="",
        group="consumer",
        labels=(LOADER, ERROR),
        help="Errors raised in the training loop, by kind.",
        how_to_read="Anything above 0 reached the training loop, whether it went on or not.",
    ),
    # -- workers -----------------------------------------------------------------------------------------------------
    Metric(
        name="dpex_worker_seconds_total",
        kind="counter",
        unit="seconds",
        group="workers",
        labels=(LOADER, LANE, STAGE),
        help="Wall time spent making batches, by stage, over all workers of a lane.",
        how_to_read="Over dpex_worker_batch_seconds_count: what a batch costs; over dpex_workers_running: use.",
    ),
    Metric(
        name="dpex_worker_cpu_seconds_total",
        kind="counter",
        unit="seconds",
        group="workers",
        labels=(LOADER, LANE, STAGE),
        help="CPU time spent making batches by the thread that makes them, by stage, over all workers of a lane.",
        how_to_read="Over dpex_worker_seconds_total: near 1 computes; under 0.5 waits for storage, or for a free CPU.",
    ),
    Metric(
        name="dpex_worker_batch_seconds",
        kind="histogram",
        unit="seconds",
        group="workers",
        labels=(LOADER, LANE),
        buckets=STEP_BUCKETS,
        help="How long a worker was busy with one batch.",
        how_to_read="A long tail makes stragglers, which look-ahead hides. Its count is the batches made by that lane.",
    ),
    Metric(
        name="dpex_workers_wanted",
        kind="gauge",
        unit="",
        group="workers",
        labels=(LOADER, HOSTS),
        help="Workers that the user or the tuner wants.",
        how_to_read="Above dpex_workers_running for long: the machine or the cluster does not give them.",
    ),
    Metric(
        name="dpex_workers_requested",
        kind="gauge",
        unit="",
        group="workers",
        labels=(LOADER, HOSTS),
        help="Workers asked of the system, those running included.",
        how_to_read="Above dpex_workers_running: they are starting, or wait for a place on the cluster.",
    ),
    Metric(
        name="dpex_workers_running",
        kind="gauge",
        unit="",
        group="workers",
        labels=(LOADER, HOSTS),
        help="Workers that take batches to be made.",
        how_to_read="What there really is; it follows dpex_workers_wanted.",
    ),
    Metric(
        name="dpex_worker_restarts_total",
        kind="counter",
        unit="",
        group="workers",
        labels=(LOADER, HOSTS),
        help="Workers that ended unexpectedly; each is replaced.",
        how_to_read="A slow rise is a leak, the out-of-memory killer or preempted nodes; the log says why each died.",
    ),
    Metric(
        name="dpex_batches_remade_total",
        kind="counter",
        unit="",
        group="workers",
        labels=(LOADER,),
        help="Batches made again because the worker that held them died.",
        how_to_read="Work lost to dpex_worker_restarts_total; no batch is lost or delivered twice.",
    ),
    # -- queue -------------------------------------------------------------------------------------------------------
    Metric(
        name="dpex_ready_batches",
        kind="gauge",
        unit="",
        group="queue",
        labels=(LOADER,),
        help="Batches that are made, were taken in and wait for the training loop.",
        how_to_read="Near 0: workers are behind. Near dpex_prefetch_limit_batches: the training loop is slower.",
    ),
    Metric(
        name="dpex_prefetch_limit_batches",
        kind="gauge",
        unit="",
        group="queue",
        labels=(LOADER,),
        help="Batches that may be drawn and not yet delivered, at most.",
        how_to_read="The capacity to compare dpex_ready_batches and dpex_in_flight_batches with.",
    ),
    Metric(
        name="dpex_in_flight_batches",
        kind="gauge",
        unit="",
        group="queue",
        labels=(LOADER, HOSTS),
        help="Batches that are with workers, being made or waiting for their turn there.",
        how_to_read="Below dpex_workers_running some workers have nothing to do: look further ahead, or have fewer.",
    ),
    Metric(
        name="dpex_transfer_bytes_total",
        kind="counter",
        unit="bytes",
        group="queue",
        labels=(LOADER, PATH),
        help="Bytes of batches moved to the training process, by path, and on into page-locked memory (h2d).",
        how_to_read="A `network` rate near the link's speed is the limit of remote workers.",
    ),
    # -- tuner -------------------------------------------------------------------------------------------------------
    Metric(
        name="dpex_tuner_decisions_total",
        kind="counter",
        unit="",
        group="tuner",
        labels=(LOADER, KNOB, DIRECTION),
        help="Changes of a setting that the tuner decided on, by what was changed and which way.",
        how_to_read="Many at first and few later is normal; ups and downs all the time is a load that keeps changing.",
    ),
    Metric(
        name="dpex_tuner_undone_total",
        kind="counter",
        unit="",
        group="tuner",
        labels=(LOADER,),
        help="Decisions taken back because they did not bring what they should.",
        how_to_read="Now and then is how it finds the limit; more than half of all decisions is a noisy machine.",
    ),
    Metric(
        name="dpex_tuner_predicted_stall_ratio",
        kind="gauge",
        unit="ratio",
        group="tuner",
        labels=(LOADER,),
        help="Share of wall time that the training loop should wait after the latest decision that was judged.",
        how_to_read="Beside dpex_tuner_measured_stall_ratio: close together means that the tuner's model fits.",
    ),
    Metric(
        name="dpex_tuner_measured_stall_ratio",
        kind="gauge",
        unit="ratio",
        group="tuner",
        labels=(LOADER,),
        help="Share of wall time that the training loop did wait after the latest decision that was judged.",
        how_to_read="What the decision brought; see dpex_tuner_predicted_stall_ratio.",
    ),
    Metric(
        name="dpex_tuner_prediction_error_ratio",
        kind="gauge",
        unit="ratio",
        group="tuner",
        labels=(LOADER,),
        help="Distance between predicted and measured share of waiting, on average over the decisions judged so far.",
        how_to_read="Under 0.05 trust the predictions; over 0.2 the load changes faster than it can be learnt.",
    ),
    Metric(
        name="dpex_tuner_predicted_batches_per_second",
        kind="gauge",
        unit="batches_per_second",
        group="tuner",
        labels=(LOADER,),
        help="Batches per second that the training loop should get after the latest decision that was judged.",
        how_to_read="Compare with dpex_tuner_measured_batches_per_second.",
    ),
    Metric(
        name="dpex_tuner_measured_batches_per_second",
        kind="gauge",
        unit="batches_per_second",
        group="tuner",
        labels=(LOADER,),
        help="Batches per second that the training loop did get after the latest decision that was judged.",
        how_to_read="Compare with dpex_tuner_predicted_batches_per_second.",
    ),
    # -- GPU ---------------------------------------------------------------------------------------------------------
    Metric(
        name="dpex_gpu_stall_seconds_total",
        kind="counter",
        unit="seconds",
        group="gpu",
        labels=(LOADER,),
        help="Time the GPU's training stream had nothing to do because the host waited for a batch, by CUDA events; "
        "from when CUDA is first used, the start of each pass included.",
        how_to_read="What waiting really costs: less than the host's wait wherever queued kernels cover it.",
    ),
    Metric(
        name="dpex_gpu_kernel_active_ratio",
        kind="gauge",
        unit="ratio",
        group="gpu",
        labels=(GPU,),
        help="Share of time in which at least one kernel ran (NVML utilisation).",
        how_to_read="Low is bad, but high is not yet good: one busy multiprocessor of many counts as 1.",
    ),
    Metric(
        name="dpex_gpu_sm_active_ratio",
        kind="gauge",
        unit="ratio",
        group="gpu",
        labels=(GPU,),
        help="Share of multiprocessors that were busy, averaged over time (GPM; Hopper and later).",
        how_to_read="The honest utilisation; low with little stall means kernels that are too small.",
    ),
    Metric(
        name="dpex_gpu_sm_occupancy_ratio",
        kind="gauge",
        unit="ratio",
        group="gpu",
        labels=(GPU,),
        help="Warps resident on the multiprocessors over the most there could be (GPM; Hopper and later).",
        how_to_read="Low is no fault by itself; it says whether there is room to hide latencies.",
    ),
    Metric(
        name="dpex_gpu_dram_active_ratio",
        kind="gauge",
        unit="ratio",
        group="gpu",
        labels=(GPU,),
        help="Share of the device memory's bandwidth in use (GPM; Hopper and later).",
        how_to_read="Near 1 the training step is bound by memory; faster data loading will not help.",
    ),
    Metric(
        name="dpex_gpu_memory_used_bytes",
        kind="gauge",
        unit="bytes",
        group="gpu",
        labels=(GPU,),
        help="Device memory in use by everybody.",
        how_to_read="Over dpex_gpu_memory_size_bytes: how full the device is.",
    ),
    Metric(
        name="dpex_gpu_memory_size_bytes",
        kind="gauge",
        unit="bytes",
        group="gpu",
        labels=(GPU,),
        help="Device memory there is.",
        how_to_read="The capacity behind dpex_gpu_memory_used_bytes.",
    ),
    Metric(
        name="dpex_gpu_pcie_bytes_total",
        kind="counter",
        unit="bytes",
        group="gpu",
        labels=(GPU, BUS),
        help="Bytes over the PCIe bus, by direction, of everybody who uses the GPU.",
        how_to_read="An `rx` rate near the bus's speed means that copying to the device is the limit.",
    ),
    Metric(
        name="dpex_gpu_info",
        kind="info",
        unit="",
        group="gpu",
        labels=(GPU, Label(name="index", help="the driver's number"), Label(name="model")),
        help="Which GPU a UUID is; always 1.",
        how_to_read="Join it to other GPU metrics by `gpu` to show a name.",
    ),
    # -- process -----------------------------------------------------------------------------------------------------
    Metric(
        name="dpex_build_info",
        kind="info",
        unit="",
        group="process",
        labels=(Label(name="version"), Label(name="python"), Label(name="torch")),
        help="Versions in the training process; always 1.",
        how_to_read="Tells runs with different software apart.",
    ),
    Metric(
        name="dpex_loader_info",
        kind="info",
        unit="",
        group="process",
        labels=(LOADER, Label(name="dataset", help="its class"), Label(name="batch_size"), Label(name="seeding")),
        help="What a loader loads; always 1.",
        how_to_read="Join it to other metrics by `loader`.",
    ),
    Metric(
        name="dpex_collect_duration_seconds",
        kind="gauge",
        unit="seconds",
        group="process",
        labels=(COLLECTOR,),
        help="How long it took to collect the values of this scrape.",
        how_to_read="Some milliseconds at most; it does not slow training but competes for the interpreter.",
    ),
    Metric(
        name="dpex_collect_errors_total",
        kind="counter",
        unit="",
        group="process",
        labels=(COLLECTOR,),
        help="Scrapes in which a collector failed; its series are missing then.",
        how_to_read="Anything above 0 is an error in dpex; the log has it.",
    ),
)

BY_NAME = {metric.name: metric for metric in METRICS}
