"""Metrics of GPUs: how long they wait for data, and what NVML says of them. PURE."""

from __future__ import annotations

from dpex.telemetry.labels import BUS, GPU, LOADER, Label
from dpex.telemetry.metric import COUNTED, Metric

OF_GPUS: tuple[Metric, ...] = (
    Metric(
        name="dpex_gpu_stall_seconds_total",
        kind="counter",
        unit="seconds",
        group="gpu",
        labels=(LOADER,),
        help=COUNTED["dpex_gpu_stall_seconds_total"],
        how_to_read="What waiting really costs: less than the loop's wait wherever queued kernels cover it.",
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
        how_to_read="The honest utilisation; low with little wait means kernels that are too small.",
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
        how_to_read=(
            "An `rx` rate near the bus's speed means that copying to the device is the limit. It begins with the first "
            "scrape. Where the driver's counter has 32 bits, rates above 2 GB/s are not counted in full. A counter "
            "that stays 0, as on some virtual machines, is not exported."
        ),
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
)
