"""The dashboard: from the question (is training starving, which rank, since when) to why, and on to `machinery`."""

from __future__ import annotations

from dashboards.grafana import (
    VALUE_AND_NAME,
    Row,
    annotation,
    as_text,
    graph,
    heat_map,
    number,
    query,
    time_line,
    variable,
)
from dashboards.machinery import HEALTH, QUEUE, TRANSFER, WORKERS
from dashboards.promql import (
    GPU_STALLED,
    PROCESS,
    RANK,
    SPENT,
    STARVED,
    STARVED_PART,
    STEPS,
    WAITED,
    about,
    increase,
    quantile,
    rate,
)

_FALLBACK = (
    "GPU stall where it is measured (CUDA events), else the share of time in which the training loop waited for a "
    "batch. The two are not the same: kernels that are queued keep the GPU busy while the training loop waits."
)

# -- is training starving, which rank, since when ----------------------------------------------------------------------

HEADLINE = Row(
    title="Is training starving, which rank, since when?",
    panels=(
        number(
            title="Starving most (GPU stall, else wait)",
            description=f"The rank that misses the largest share of its time for want of data. {_FALLBACK} The slowest "
            "rank of a data-parallel run holds up all others. Green: under 5 %, loading is not the bottleneck. Red: "
            "over 20 %, it is.",
            queries=(query(expr=f"topk(1, {STARVED})", legend=RANK, instant=True),),
            unit="percentunit",
            width=6,
            height=5,
            steps=STEPS,
            text=VALUE_AND_NAME,
        ),
        number(
            title="Starving since",
            description="Since when each rank has been over 20 % without a break, in the eyes of the rule "
            "DpexTrainingStarving. It needs the rules to be loaded in Prometheus; the time line below does not.",
            queries=(
                query(
                    expr="min by (run_id, rank) "
                    f'(ALERTS_FOR_STATE{{alertname="DpexTrainingStarving",{PROCESS}}}) * 1000',
                    legend=RANK,
                    instant=True,
                ),
            ),
            unit="dateTimeFromNow",
            width=6,
            height=5,
            lowest=None,
            none="not starving",
            text=VALUE_AND_NAME,
            steps=((None, "red"),),
        ),
        number(
            title="GPU stall, all ranks",
            description=about("dpex_gpu_stall_seconds_total") + " As a share of the time of the ranks that measure it.",
            queries=(
                query(
                    expr=f"sum({GPU_STALLED}) / sum({SPENT} and on (job, instance) {GPU_STALLED})",
                    legend="GPU stall",
                    instant=True,
                ),
            ),
            unit="percentunit",
            width=4,
            height=5,
            steps=STEPS,
            none="no GPU measured",
        ),
        number(
            title="Wait, all ranks",
            description="Share of the training loops' time spent waiting for a batch. Not yet a loss where a GPU has "
            "work queued: see GPU stall beside it.",
            queries=(query(expr=f"sum({WAITED}) / sum({SPENT})", legend="wait", instant=True),),
            unit="percentunit",
            width=4,
            height=5,
            steps=STEPS,
        ),
        number(
            title="Samples per second",
            description=about("dpex_samples_total"),
            queries=(query(expr=f"sum({rate('dpex_samples_total')})", legend="samples", instant=True),),
            unit="cps",
            width=4,
            height=5,
        ),
        time_line(
            title="Which rank starves, since when",
            description=f"{_FALLBACK} Green: under 5 %; yellow: up to 20 %; red: over it; gaps: no pass was under way.",
            queries=(query(expr=STARVED, legend=RANK),),
            unit="percentunit",
            width=12,
            steps=STEPS,
        ),
        graph(
            title="Share of time starved by rank (GPU stall, else wait)",
            description=f"{_FALLBACK} One rank above the others: its node or its data. All of them: the pipeline.",
            queries=(query(expr=STARVED, legend=RANK),),
            unit="percentunit",
            width=12,
            steps=STEPS,
        ),
        graph(
            title="Each rank's part of what the job loses",
            description="In a data-parallel run the ranks wait in their steps for the rank that has no batch. One line "
            "above two thirds: this rank starves the job (alert DpexRankStarvesJob). Lines that cross: the straggler "
            "moves, as batches cost differently. Lines that lie together: all ranks alike. It means little while no "
            "rank is yellow or red above.",
            queries=(query(expr=STARVED_PART, legend=RANK),),
            unit="percentunit",
            width=24,
        ),
    ),
)

# -- why ---------------------------------------------------------------------------------------------------------------

WHY = Row(
    title="Why?",
    panels=(
        graph(
            title="Where the training loops' time goes",
            description=about("dpex_consumer_seconds_total"),
            queries=(
                query(
                    expr=f"sum by (state) ({SPENT}) / ignoring (state) group_left () sum({SPENT})", legend="{{state}}"
                ),
            ),
            unit="percentunit",
            highest=1,
            stacked=True,
        ),
        graph(
            title="What the wait is for",
            description=about("dpex_wait_seconds_total")
            + " read: the part of loading that waits; transform: the part that computes; transit: on the network; "
            "straggler: later batches were ready; startup: the first batch, or workers still to come; sampler: drawing "
            "from the sampler; dispatch: handing out work.",
            queries=(
                query(
                    expr=f"sum by (cause) ({rate('dpex_wait_seconds_total')}) / ignoring (cause) group_left () "
                    f"sum({SPENT})",
                    legend="{{cause}}",
                ),
            ),
            unit="percentunit",
            stacked=True,
        ),
        graph(
            title="CPUs that a worker uses in a stage",
            description=about("dpex_worker_cpu_seconds_total") + " Above 1: libraries compute in several threads.",
            queries=(
                query(
                    expr=f"sum by (stage) ({rate('dpex_worker_cpu_seconds_total')}) / "
                    f"sum by (stage) ({rate('dpex_worker_seconds_total')})",
                    legend="{{stage}}",
                ),
            ),
            unit="none",
        ),
        graph(
            title="Wait per batch, quantiles",
            description=about("dpex_batch_wait_seconds"),
            queries=tuple(
                query(expr=quantile(q, "dpex_batch_wait_seconds"), legend=f"p{100 * q:g}") for q in (0.5, 0.95, 0.99)
            ),
            unit="s",
        ),
        heat_map(
            title="Wait per batch, all of them",
            description="Batches by how long they were waited for. A dark band at the bottom is health; a second band "
            "above it are stragglers.",
            queries=(query(expr=f"sum by (le) ({increase('dpex_batch_wait_seconds_bucket')})", legend="{{le}}"),),
            unit="s",
        ),
        graph(
            title="Time of a step, quantiles",
            description=about("dpex_step_seconds"),
            queries=tuple(query(expr=quantile(q, "dpex_step_seconds"), legend=f"p{100 * q:g}") for q in (0.5, 0.95)),
            unit="s",
        ),
    ),
)

# -- around them -------------------------------------------------------------------------------------------------------

VARIABLES = (
    variable(name="job", label="Job", query="label_values(dpex_build_info, job)", everything=".+"),
    variable(name="run", label="Run", query='label_values(dpex_build_info{job=~"$job"}, run_id)'),
    variable(name="rank", label="Rank", query='label_values(dpex_build_info{job=~"$job",run_id=~"$run"}, rank)'),
    variable(
        name="instance",
        label="Instance",
        query='label_values(dpex_build_info{job=~"$job",run_id=~"$run",rank=~"$rank"}, instance)',
        everything=".+",
    ),
    variable(
        name="loader",
        label="Loader",
        query='label_values(dpex_loader_info{job=~"$job",run_id=~"$run",rank=~"$rank",instance=~"$instance"}, loader)',
    ),
)
"""Run and rank match series without these labels as well: those of a Prometheus that was told its targets by hand."""

ANNOTATIONS = (
    annotation(
        name="Decisions of the tuner",
        expr="sum by (run_id, rank, loader, knob, direction) "
        f"({increase('dpex_tuner_decisions_total', window='30s')}) > 0",
        title="{{knob}} {{direction}}",
        text=f"{RANK}, {{{{loader}}}}",
        colour="blue",
    ),
    annotation(
        name="Workers lost",
        expr=f"sum by (run_id, rank, loader, pool) ({increase('dpex_worker_restarts_total', window='30s')}) > 0",
        title="{{pool}} worker lost",
        text=f"{RANK}, {{{{loader}}}}",
        colour="orange",
    ),
    annotation(
        name="Alerts",
        expr=f'ALERTS{{alertname=~"Dpex.+",alertstate="firing",{PROCESS}}}',
        title="{{alertname}}",
        text=RANK,
        colour="red",
    ),
)


def dashboard() -> str:
    """Return the text of dpex.json."""
    return as_text(
        uid="dpex-training",
        title="dpex: is the GPU starving?",
        description="A training run as its data loader sees it: is it starving, which rank, since when, and why.",
        tags=("dpex", "pytorch", "training"),
        rows=(HEADLINE, WHY, WORKERS, QUEUE, TRANSFER, HEALTH),
        variables=VARIABLES,
        annotations=ANNOTATIONS,
    )
