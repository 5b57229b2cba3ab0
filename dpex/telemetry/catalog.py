"""All exported metrics. Code, dashboards, rules and documentation are made from this list or checked against it.

Names follow Prometheus's rules (prometheus.io/docs/practices/naming): one prefix, one unit and one quantity per metric,
base units, ratios from 0 to 1, and ``_total`` for what accumulates. The sum or the average over all labels of a metric
is meaningful. Labels have few values, which are known here; none names a worker, a process, an epoch or a file. The
labels of the scrape target name the job, rank and node (see `dpex.telemetry.discovery`).

``docs/metrics.md`` lists them; `dashboards.metrics_page` writes the list.
"""

from __future__ import annotations

from dataclasses import replace

from dpex.measure.consumer_time import STEP_BUCKETS, WAIT_BUCKETS
from dpex.measure.wait_causes import CAUSES
from dpex.schedule.names import KNOBS, POOLS, REMOTE, WORKER_POOLS
from dpex.telemetry.metric import COUNTED, Group, Label, Metric

STATES = ("wait", "transfer", "work")
STAGES = ("load", "collate", "encode")
OTHERS = "others"

LOADER = Label(name="loader", most=4, help='the loader\'s `name=`, else "loader-1" and so on')
STATE = Label(name="state", values=STATES, help="exclusive; all three together are the wall time of all passes")
CAUSE = Label(name="cause", values=CAUSES, help='exclusive; all of them together are `state="wait"`')
POOL = Label(name="pool", values=POOLS, help="where batches are made: the training process, this machine, the cluster")
WORKER_POOL = Label(name="pool", values=WORKER_POOLS, help="where workers are: this machine, the cluster")
CLUSTER = Label(name="pool", values=(REMOTE,), help="the cluster: only from there batches come over a network")
MACHINE = Label(name="machine", most=9, help=f'a machine of the cluster; the ninth and later ones are "{OTHERS}"')
STAGE = Label(name="stage", values=STAGES, help="`dataset[i]`; the collate function; writing the batch into a slot")
PATHS = ("shm", "network", "object_store", "h2d", "device")
PATH = Label(
    name="path", values=PATHS, help="shared memory, connection, Ray's object store, page-locked memory, device"
)
PARTS = ("copy", "transform", "wait")
PART = Label(name="part", values=PARTS, help="copies; `device_transform`; the training stream waiting for them")
ERRORS = ("batch", "worker", "timeout")
ERROR = Label(name="kind", values=ERRORS, help="user's code failed, workers were lost, `timeout=`")
KNOB = Label(name="knob", values=KNOBS, help="workers here, workers on the cluster, prefetch")
DIRECTION = Label(name="direction", values=("up", "down"))
GPU = Label(name="gpu", most=8, help="the GPU's UUID")
BUS = Label(name="direction", values=("rx", "tx"), help="rx: to the GPU, tx: from it")
COLLECTOR = Label(name="collector", values=("loaders", "gpu"))


def _in(group: Group, *metrics: Metric) -> tuple[Metric, ...]:
    return tuple(replace(one, group=group, help=one.help or COUNTED[one.name]) for one in metrics)


# Of each: name and labels, how to read it, and what is measured unless the exported field says that.
# fmt: off
METRICS: tuple[Metric, ...] = (
    *_in("consumer",
      Metric("dpex_consumer_seconds_total", (LOADER, STATE),
        "Share of `wait` in all states: under 5 % loading is not the bottleneck, over 20 % it is.",
        "Wall time of the training loop, by what it was doing: waiting for a batch, taking it in, or working."),
      Metric("dpex_wait_seconds_total", (LOADER, CAUSE),
        "The largest cause is what to work on: its rate is the share of wall time that it costs."),
      Metric("dpex_batches_total", (LOADER,),
        "Its rate is the training loop's speed; a rate of 0 between epochs is normal."),
      Metric("dpex_samples_total", (LOADER,),
        "Its rate is comparable between runs of different batch sizes."),
      Metric("dpex_batch_wait_seconds", (LOADER,),
        "A median near 0 with a long tail means stragglers; everything shifted up, too "
        "little throughput.", buckets=WAIT_BUCKETS),
      Metric("dpex_step_seconds", (LOADER,),
        "The time that a batch may take without a wait; with a GPU the loop may run ahead "
        "of the device.", buckets=STEP_BUCKETS),
      Metric("dpex_last_batch_timestamp_seconds", (LOADER,),
        "`time() - dpex_last_batch_timestamp_seconds` grows while training is stuck, or at something else.",
        "Unix time at which the latest batch was delivered."),
      Metric("dpex_errors_total", (LOADER, ERROR),
        "Anything above 0 reached the training loop, whether it went on or not.")),
    *_in("workers",
      Metric("dpex_worker_seconds_total", (LOADER, POOL, STAGE),
        "Over dpex_worker_batch_seconds_count: what a batch costs; over dpex_workers_running: use.",
        "Wall time spent making batches, by stage, over all workers of a pool."),
      Metric("dpex_worker_cpu_seconds_total", (LOADER, POOL, STAGE),
        "Over dpex_worker_seconds_total: near 1 computes; under 0.5 waits for storage, or for a free CPU.",
        "CPU time spent making batches by the thread that makes them, by stage, over all workers of a pool."),
      Metric("dpex_worker_batch_seconds", (LOADER, POOL),
        "A long tail makes stragglers, which prefetch hides. Its count is the batches made "
        "by that pool.", buckets=STEP_BUCKETS),
      Metric("dpex_workers_wanted", (LOADER, WORKER_POOL),
        "Above dpex_workers_running for long: the machine or the cluster does not give them."),
      Metric("dpex_workers_requested", (LOADER, WORKER_POOL),
        "Above dpex_workers_running: they are starting, or wait for a place on the cluster."),
      Metric("dpex_workers_running", (LOADER, WORKER_POOL),
        "What there really is; it follows dpex_workers_wanted."),
      Metric("dpex_worker_restarts_total", (LOADER, WORKER_POOL),
        "A slow rise is a leak, the out-of-memory killer or preempted nodes; the log says why each died."),
      Metric("dpex_nodes_left_alone", (LOADER, CLUSTER),
        "Their work is done by others, and they get another chance; the log says why."),
      Metric("dpex_batches_remade_total", (LOADER,),
        "Work lost to dpex_worker_restarts_total; no batch is lost or delivered twice."),
      Metric("dpex_late_batches_total", (LOADER,),
        "Rises where a machine or its link is much slower than the others: `dpex cluster` shows which."),
      Metric("dpex_failed_samples_total", (LOADER,),
        "Over dpex_samples_total: the share that max_sample_errors limits. The log names each."),
      Metric("dpex_batches_shared_total", (LOADER, WORKER_POOL),
        "Over dpex_worker_batch_seconds_count: the part that cost this training nothing.")),
    *_in("queue",
      Metric("dpex_ready_batches", (LOADER,),
        "Near 0: workers are behind. Near dpex_prefetch_batches: the training loop is slower."),
      Metric("dpex_prefetch_batches", (LOADER,),
        "The capacity to compare dpex_ready_batches and dpex_in_flight_batches with."),
      Metric("dpex_in_flight_batches", (LOADER, WORKER_POOL),
        "Below dpex_workers_running some workers have nothing to do: look further ahead, or have fewer."),
      Metric("dpex_transfer_bytes_total", (LOADER, PATH),
        "A `network` rate near the link's speed is the limit of remote workers. With `compression=\"zstd\"` it counts "
        "batches as they are, and may be above the link's speed."),
      Metric("dpex_network_sent_bytes_total", (LOADER, CLUSTER, MACHINE),
        "Over dpex_network_sending_seconds_total: the bandwidth while sending. Over the `network` rate of "
        "dpex_transfer_bytes_total: what `compression=\"zstd\"` leaves of the bytes."),
      Metric("dpex_network_resent_bytes_total", (LOADER, CLUSTER, MACHINE),
        "Over dpex_network_sent_bytes_total: loss. From a thousandth on it slows long ways down."),
      Metric("dpex_network_sending_seconds_total", (LOADER, CLUSTER, MACHINE),
        "Near one second per second and machine, the network is the limit of remote workers."),
      Metric("dpex_network_round_trip_seconds", (LOADER, CLUSTER, MACHINE),
        "Under a millisecond in a rack. Prefetch hides it."),
      Metric("dpex_device_feed_seconds_total", (LOADER, PART),
        "`wait` near 0: copies and transforms hide behind training. If it grows, the larger of the others is what "
        "to make cheaper: `uint8` until the device, or less in `device_transform`.",
        "Seconds of the device, by what it did with batches that a loader with `device=` brings to it.")),
    *_in("tuner",
      Metric("dpex_tuner_decisions_total", (LOADER, KNOB, DIRECTION),
        "Many at first and few later is normal; ups and downs all the time is a load that keeps changing.",
        "Changes of a setting that the tuner decided on, by what was changed and which way."),
      Metric("dpex_tuner_undone_total", (LOADER,),
        "Now and then is how it finds the limit; more than half of all decisions is a noisy machine.",
        "Decisions taken back because they did not bring what they should."),
      Metric("dpex_tuner_predicted_wait_ratio", (LOADER,),
        "Beside dpex_tuner_measured_wait_ratio: close together means that the tuner's model fits.",
        "Share of wall time that the training loop should wait after the latest decision that was judged."),
      Metric("dpex_tuner_measured_wait_ratio", (LOADER,),
        "What the decision brought; see dpex_tuner_predicted_wait_ratio.",
        "Share of wall time that the training loop did wait after the latest decision that was judged."),
      Metric("dpex_tuner_prediction_error_ratio", (LOADER,),
        "Under 0.05 trust the predictions; over 0.2 the load changes faster than it can be learnt.",
        "Distance between predicted and measured share of waiting, on average over the decisions judged so far."),
      Metric("dpex_tuner_predicted_batches_per_second", (LOADER,),
        "Compare with dpex_tuner_measured_batches_per_second.",
        "Batches per second that the training loop should get after the latest decision that was judged."),
      Metric("dpex_tuner_measured_batches_per_second", (LOADER,),
        "Compare with dpex_tuner_predicted_batches_per_second.",
        "Batches per second that the training loop did get after the latest decision that was judged.")),
    *_in("gpu",
      Metric("dpex_gpu_stall_seconds_total", (LOADER,),
        "What waiting really costs: less than the loop's wait wherever queued kernels cover it."),
      Metric("dpex_gpu_kernel_active_ratio", (GPU,),
        "Low is bad, but high is not yet good: one busy multiprocessor of many counts as 1.",
        "Share of time in which at least one kernel ran (NVML utilisation)."),
      Metric("dpex_gpu_sm_active_ratio", (GPU,),
        "The honest utilisation; low with little wait means kernels that are too small.",
        "Share of multiprocessors that were busy, averaged over time (GPM; Hopper and later)."),
      Metric("dpex_gpu_sm_occupancy_ratio", (GPU,),
        "Low is no fault by itself; it says whether there is room to hide latencies.",
        "Warps resident on the multiprocessors over the most there could be (GPM; Hopper and later)."),
      Metric("dpex_gpu_dram_active_ratio", (GPU,),
        "Near 1 the training step is bound by memory; faster data loading will not help.",
        "Share of the device memory's bandwidth in use (GPM; Hopper and later)."),
      Metric("dpex_gpu_memory_used_bytes", (GPU,),
        "Over dpex_gpu_memory_size_bytes: how full the device is.",
        "Device memory in use, that of other processes included."),
      Metric("dpex_gpu_memory_size_bytes", (GPU,),
        "The capacity behind dpex_gpu_memory_used_bytes.",
        "Size of the device memory."),
      Metric("dpex_gpu_pcie_bytes_total", (GPU, BUS),
        "An `rx` rate near the bus's speed means that copying to the device is the limit. It begins with the first "
        "scrape. A counter of 32 bits does not show more than 2 GB/s in full. A counter that stays 0, as on some "
        "virtual machines, is not exported.",
        "Bytes over the PCIe bus, by direction, those of other processes included."),
      Metric("dpex_gpu_info", (GPU, Label(name="index", help="the driver's number"), Label(name="model")),
        "Join it to other GPU metrics by `gpu` to show a name.",
        "Index and model of a GPU; always 1.")),
    *_in("process",
      Metric("dpex_build_info", (Label(name="version"), Label(name="python"), Label(name="torch")),
        "Tells runs with different software apart.",
        "Versions in the training process; always 1."),
      Metric("dpex_loader_info",
        (LOADER, Label(name="dataset", help="its class"), Label(name="batch_size"), Label(name="seeding")),
        "Join it to other metrics by `loader`.",
        "Dataset and settings of a loader; always 1."),
      Metric("dpex_collect_duration_seconds", (COLLECTOR,),
        "Some milliseconds at most; it does not slow training but competes for the interpreter.",
        "Time to collect the values of this scrape."),
      Metric("dpex_collect_errors_total", (COLLECTOR,),
        "Anything above 0 is an error in dpex; the log has it.",
        "Scrapes in which a collector failed; its series are missing then.")),
)
# fmt: on

BY_NAME = {metric.name: metric for metric in METRICS}
