"""What a loader's diagnosis and its metrics are made from, and what is said where nothing was counted."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from dpex.options import MetricsConfig
from dpex.schedule.names import encodable

if TYPE_CHECKING:
    from dpex.diagnose.source import DiagnosisSource
    from dpex.loader.runtime import LoaderRuntime
    from dpex.loader.sizing import SizeOptions
    from dpex.telemetry.loader_metrics import LoaderMetrics


def diagnosis_source(loader: Any, runtime: LoaderRuntime, options: SizeOptions) -> DiagnosisSource:
    """The counts of all iterators so far, and what is known of the loader without counting. It holds no loader."""
    from dpex.diagnose.source import Context, DiagnosisSource
    from dpex.profile.live_timer import SWITCH, is_switched_on
    from dpex.system.cpus import rank

    context = Context(
        name=encodable(loader.name or ""),
        rank=rank(os.environ),
        dataset=encodable(type(loader.dataset).__name__),
        batch_size=str(loader.batch_size),
        is_tuned=runtime.tuner is not None,
        keeps_workers=options.is_iterable,
        has_cluster=options.may_be_remote,
        starts_anew=not loader.persistent_workers,
        note=_why_unmeasured(runtime, options),
        untimed="" if is_switched_on(os.environ) else f"${SWITCH} forbids it",
    )
    return DiagnosisSource(book=runtime.counters, context=context, tuner=runtime.tuner)


def exported_counts(loader: Any, runtime: LoaderRuntime, *, on_cluster: bool) -> LoaderMetrics | None:
    """Where the counts of this loader's iterators go, if they are exported."""
    config = loader.metrics_config if loader.metrics_port is None else MetricsConfig(port=loader.metrics_port)
    info = (type(loader.dataset).__name__, str(loader.batch_size), loader.seeding)
    metrics = runtime.metrics(config, loader.name, info, on_cluster=on_cluster)
    if metrics is not None:
        metrics.tuner, metrics.case = runtime.tuner, loader._diagnosis_source()
    return metrics


def _why_unmeasured(runtime: LoaderRuntime, options: SizeOptions) -> str:
    """Why that is, should no batch have been counted."""
    if options.why_torch is not None or options.is_piped:
        return "anything: PyTorch's own iterators make the batches of this loader"
    if not runtime.is_diagnosed and options.num_workers == 0:
        return "passes before this call: without workers it is measured from now on, or with DPEX_DIAGNOSE=1"
    return "anything: no batch was delivered yet"
