"""The rows that tell what is behind it: workers, queue and decisions, transfer and GPU, health."""

from __future__ import annotations

from dashboards.grafana import Row, graph, label_table, query, time_line
from dashboards.promql import (
    BY_MACHINE,
    BY_RANK,
    GPU_STALL,
    MACHINE,
    PROCESS,
    RANK,
    SPENT,
    STEPS,
    about,
    increase,
    of,
    quantile,
    rate,
)

# -- who makes batches, and where --------------------------------------------------------------------------------------

MADE = rate("dpex_worker_batch_seconds_count")
WORKERS = Row(
    title="Who makes batches, and where?",
    panels=(
        graph(
            title="Workers by place",
            description=about("dpex_workers_wanted", "dpex_workers_requested", "dpex_workers_running"),
            queries=tuple(
                query(expr=f"sum by (pool) ({of(f'dpex_workers_{state}')})", legend=f"{{{{pool}}}} {state}")
                for state in ("wanted", "requested", "running")
            ),
            unit="none",
            dashed=".* (wanted|requested)",
        ),
        graph(
            title="Batches per second by place",
            description="Batches made, by where: inline is the training process, local this machine, remote the "
            f"cluster. {about('dpex_batches_total')}",
            queries=(
                query(expr=f"sum by (pool) ({MADE})", legend="made {{pool}}"),
                query(expr=f"sum({rate('dpex_batches_total')})", legend="delivered"),
            ),
            unit="cps",
            dashed="delivered",
        ),
        graph(
            title="How busy workers are",
            description="Share of their time in which workers make batches. Near 1: more workers would bring more. "
            "Low while training starves: they are not given work, or something else holds up. A batch counts when it "
            "is made, so a share that comes to more than 1 is shown as 1. " + about("dpex_worker_seconds_total"),
            queries=(
                query(
                    expr=f"""clamp_max(sum by (pool) ({rate("dpex_worker_seconds_total", 'pool!="inline"')}) / """
                    f"(sum by (pool) ({of('dpex_workers_running')}) > 0), 1)",
                    legend="{{pool}}",
                ),
            ),
            unit="percentunit",
            highest=1,
        ),
        graph(
            title="Cost of a batch by stage",
            description="Seconds of a worker's time for one batch. The largest stage is what to make faster.",
            queries=(
                query(
                    expr=f"sum by (pool, stage) ({rate('dpex_worker_seconds_total')}) / ignoring (stage) group_left () "
                    f"sum by (pool) ({MADE})",
                    legend="{{pool}} {{stage}}",
                ),
            ),
            unit="s",
            stacked=True,
        ),
        graph(
            title="Cost of a batch, quantiles",
            description=about("dpex_worker_batch_seconds"),
            queries=tuple(
                query(expr=quantile(q, "dpex_worker_batch_seconds", "pool, le"), legend=f"{{{{pool}}}} p{100 * q:g}")
                for q in (0.5, 0.95)
            ),
            unit="s",
        ),
        graph(
            title="Samples from the cache",
            description=about("dpex_cache_hits_total", "dpex_cache_misses_total"),
            queries=(
                query(
                    expr=f"sum({rate('dpex_cache_hits_total')}) / "
                    f"(sum({rate('dpex_cache_hits_total')}) + sum({rate('dpex_cache_misses_total')}))",
                    legend="share of samples from it",
                ),
            ),
            unit="percentunit",
            none="no cache",
        ),
        graph(
            title="Workers that the cache replaces",
            description=about("dpex_cache_saved_seconds_total"),
            queries=(query(expr=f"sum by (pool) ({rate('dpex_cache_saved_seconds_total')})", legend="{{pool}}"),),
            unit="none",
            none="no cache",
        ),
        graph(
            title="Bytes of the cache",
            description=about("dpex_cache_memory_bytes", "dpex_cache_disk_bytes"),
            queries=tuple(
                query(
                    expr=f"max by (run_id, rank, loader) ({of(f'dpex_cache_{where}_bytes')})", legend=f"{where} {RANK}"
                )
                for where in ("memory", "disk")
            ),
            unit="bytes",
            none="no cache",
        ),
        graph(
            title="Workers lost, batches made again or for others",
            description=about(
                "dpex_worker_restarts_total",
                "dpex_nodes_excluded",
                "dpex_batches_remade_total",
                "dpex_late_batches_total",
                "dpex_batches_shared_total",
                "dpex_failed_samples_total",
            ),
            queries=(
                query(expr=f"sum by (pool) ({increase('dpex_worker_restarts_total')})", legend="{{pool}} workers lost"),
                query(expr=f"sum({of('dpex_nodes_excluded')}) or vector(0)", legend="excluded nodes"),
                query(expr=f"sum({increase('dpex_batches_remade_total')})", legend="batches made again"),
                query(expr=f"sum({increase('dpex_late_batches_total')})", legend="batches that came too late"),
                query(expr=f"sum({increase('dpex_batches_shared_total')})", legend="batches made for other trainings"),
                query(expr=f"sum({increase('dpex_failed_samples_total')})", legend="samples that failed"),
            ),
            unit="none",
            bars=True,
        ),
    ),
)

# -- queue and decisions -----------------------------------------------------------------------------------------------

QUEUE = Row(
    title="Queue and decisions",
    panels=(
        graph(
            title="Batches ready and in flight",
            description=about("dpex_ready_batches", "dpex_in_flight_batches", "dpex_prefetch_batches"),
            queries=(
                query(expr=f"sum({of('dpex_ready_batches')})", legend="ready"),
                query(expr=f"sum by (pool) ({of('dpex_in_flight_batches')})", legend="in flight {{pool}}"),
                query(expr=f"sum({of('dpex_prefetch_batches')})", legend="limit"),
            ),
            unit="none",
            width=12,
            dashed="limit",
        ),
        graph(
            title="Decisions of the tuner",
            description="Each is a mark on the other panels as well. "
            + about("dpex_tuner_decisions_total", "dpex_tuner_undone_total"),
            queries=(
                query(
                    expr=f"sum by (knob, direction) ({increase('dpex_tuner_decisions_total')})",
                    legend="{{knob}} {{direction}}",
                ),
                query(expr=f"sum({increase('dpex_tuner_undone_total')})", legend="taken back"),
            ),
            unit="none",
            width=12,
            bars=True,
            none="not tuned",
        ),
        graph(
            title="Waiting that decisions were to leave, and left",
            description=about("dpex_tuner_predicted_wait_ratio", "dpex_tuner_measured_wait_ratio"),
            queries=tuple(
                query(
                    expr=f"avg by (run_id, rank, loader) ({of(f'dpex_tuner_{kind}_wait_ratio')})",
                    legend=f"{kind}, {RANK}, {{{{loader}}}}",
                )
                for kind in ("predicted", "measured")
            ),
            unit="percentunit",
            width=12,
            dashed="predicted.*",
            none="no decision judged yet",
        ),
        graph(
            title="Speed that decisions were to bring, and brought",
            description=about("dpex_tuner_predicted_batches_per_second", "dpex_tuner_measured_batches_per_second"),
            queries=tuple(
                query(
                    expr=f"avg by (run_id, rank, loader) ({of(f'dpex_tuner_{kind}_batches_per_second')})",
                    legend=f"{kind}, {RANK}, {{{{loader}}}}",
                )
                for kind in ("predicted", "measured")
            ),
            unit="cps",
            width=12,
            dashed="predicted.*",
            none="no decision judged yet",
        ),
    ),
)

# -- transfer and GPU --------------------------------------------------------------------------------------------------

GPU = PROCESS
ON_GPU = "{{gpu}}"
TRANSFER = Row(
    title="Transfer and GPU",
    is_folded=True,
    panels=(
        graph(
            title="Bytes of batches by way",
            description=about("dpex_transfer_bytes_total"),
            queries=(query(expr=f"sum by (path) ({rate('dpex_transfer_bytes_total')})", legend="{{path}}"),),
            unit="Bps",
            width=6,
        ),
        graph(
            title="Taking batches in, by rank",
            description="Share of the training loop's time spent taking in batches that have arrived: mapping, "
            "decoding and copying them.",
            queries=(
                query(
                    expr=f"""{BY_RANK} ({rate("dpex_consumer_seconds_total", 'state="transfer"')}) / """
                    f"{BY_RANK} ({SPENT})",
                    legend=RANK,
                ),
            ),
            unit="percentunit",
            width=6,
        ),
        graph(
            title="Feeding the device",
            description=about("dpex_device_feed_seconds_total") + " Seconds per second.",
            queries=(query(expr=f"sum by (part) ({rate('dpex_device_feed_seconds_total')})", legend="{{part}}"),),
            unit="percentunit",
            width=6,
            none="no loader with a device",
        ),
        graph(
            title="GPU stall by rank",
            description=about("dpex_gpu_stall_seconds_total") + " Seconds per second of the training loop.",
            queries=(query(expr=GPU_STALL, legend=RANK),),
            unit="percentunit",
            width=6,
            steps=STEPS,
            none="no GPU measured",
        ),
        graph(
            title="What the network carries while sending",
            description=about("dpex_network_sent_bytes_total", "dpex_network_sending_seconds_total"),
            queries=(
                query(
                    expr=f"{BY_MACHINE} ({rate('dpex_network_sent_bytes_total')}) / "
                    f"{BY_MACHINE} ({rate('dpex_network_sending_seconds_total')})",
                    legend=MACHINE,
                ),
            ),
            unit="Bps",
            width=8,
            none="no remote workers",
        ),
        graph(
            title="Lost on the network",
            description=about("dpex_network_resent_bytes_total"),
            queries=(
                query(
                    expr=f"{BY_MACHINE} ({rate('dpex_network_resent_bytes_total')}) / "
                    f"{BY_MACHINE} ({rate('dpex_network_sent_bytes_total')})",
                    legend=MACHINE,
                ),
            ),
            unit="percentunit",
            width=8,
            none="no remote workers",
        ),
        graph(
            title="Round trip to remote workers",
            description=about("dpex_network_round_trip_seconds"),
            queries=(query(expr=f"{BY_MACHINE} ({of('dpex_network_round_trip_seconds')})", legend=MACHINE),),
            unit="s",
            width=8,
            none="no remote workers",
        ),
        graph(
            title="GPU at work",
            description=about("dpex_gpu_kernel_active_ratio"),
            queries=(query(expr=f"avg by (gpu) ({of('dpex_gpu_kernel_active_ratio', per=GPU)})", legend=ON_GPU),),
            unit="percentunit",
            highest=1,
            none="no GPU measured",
        ),
        graph(
            title="GPU memory",
            description=about("dpex_gpu_memory_used_bytes", "dpex_gpu_memory_size_bytes"),
            queries=(
                query(expr=f"max by (gpu) ({of('dpex_gpu_memory_used_bytes', per=GPU)})", legend=f"used, {ON_GPU}"),
                query(expr=f"max by (gpu) ({of('dpex_gpu_memory_size_bytes', per=GPU)})", legend=f"size, {ON_GPU}"),
            ),
            unit="bytes",
            dashed="size.*",
            none="no GPU measured",
        ),
        label_table(
            title="GPUs",
            description=about("dpex_gpu_info"),
            queries=(query(expr=of("dpex_gpu_info", per=GPU), instant=True),),
            unit="string",
            width=12,
            hidden=("job", "instance"),
        ),
    ),
)

# -- health ------------------------------------------------------------------------------------------------------------

HEALTH = Row(
    title="Health",
    panels=(
        graph(
            title="Time since the last batch",
            description=about("dpex_last_batch_timestamp_seconds") + " By the clocks of two machines.",
            queries=(
                query(expr=f"time() - max by (run_id, rank) ({of('dpex_last_batch_timestamp_seconds')})", legend=RANK),
            ),
            unit="s",
        ),
        graph(
            title="Errors",
            description=about("dpex_errors_total"),
            queries=(query(expr=f"sum by (kind) ({increase('dpex_errors_total')})", legend="{{kind}}"),),
            unit="none",
            bars=True,
        ),
        time_line(
            title="Processes that answer",
            description="1: Prometheus reads the metrics of this process. 0: it was killed, hangs, or cannot be "
            "reached; processes that end in order vanish.",
            queries=(query(expr=f"min by (run_id, rank) ({of('up', per=PROCESS)})", legend=RANK),),
            unit="none",
            steps=((None, "red"), (1, "green")),
        ),
        label_table(
            title="Loaders",
            description=about("dpex_loader_info"),
            queries=(query(expr=of("dpex_loader_info"), instant=True),),
            unit="string",
            width=12,
            height=6,
            hidden=("job", "instance"),
        ),
        label_table(
            title="Processes",
            description=about("dpex_build_info"),
            queries=(query(expr=of("dpex_build_info", per=PROCESS), instant=True),),
            unit="string",
            width=12,
            height=6,
        ),
    ),
)
