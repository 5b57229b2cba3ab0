"""dpex is torch's DataLoader with workers on this machine and on a Ray cluster, tuned and measured while training runs.

Names are resolved when they are first used, so importing dpex starts nothing and imports neither torch nor Ray.

Examples:
    >>> from dpex import DpexDataLoader
    >>> with DpexDataLoader(range(6), batch_size=3, num_workers="auto") as loader:
    ...     for batch in loader:
    ...         print(batch)
    tensor([0, 1, 2])
    tensor([3, 4, 5])
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from dpex.version import VERSION

if TYPE_CHECKING:
    from dpex.autotune.config import AutotuneConfig
    from dpex.autotune.runtime.tuned import Tuned
    from dpex.autotune.types import Decision, Outcome, Policy
    from dpex.cache.dataset import cached
    from dpex.dataloader import DpexDataLoader
    from dpex.diagnose.diagnosis import Diagnosis
    from dpex.diagnose.facts import CallFacts, Facts
    from dpex.diagnose.verdict import Evidence, Verdict
    from dpex.diagnose.what_if import Prediction
    from dpex.errors import (
        BatchTimeoutError,
        CacheError,
        ClusterError,
        DpexError,
        InternalError,
        IteratorClosedError,
        IteratorInterruptedError,
        OptionError,
        SampleTimeoutError,
        ShareError,
        ShippingError,
        StateError,
        TooManySampleErrors,
        UsageError,
        WorkerDiedError,
    )
    from dpex.integrations import loader_behind, log_to, serve
    from dpex.measure.pool_reading import PoolReading
    from dpex.measure.sampling import FailedSample, SlowIndex
    from dpex.measure.settings import Settings
    from dpex.options import ClusterConfig, DeviceConfig, MetricsConfig, TLSConfig, WorkerConfig
    from dpex.schedule.sample_policy import SamplePolicy
    from dpex.stats import LoaderStats, StreamStats
    from dpex.transport.compact import compact
    from dpex.worker.async_dataset import AsyncDataset
    from dpex.worker.batch_seeding import batch_seed
    from dpex.worker.decoded_stream import decode_in_workers

__version__ = VERSION

_NAMES = {
    "dpex.autotune.config": ("AutotuneConfig",),
    "dpex.autotune.runtime.tuned": ("Tuned",),
    "dpex.autotune.types": ("Decision", "Outcome", "Policy"),
    "dpex.cache.dataset": ("cached",),
    "dpex.dataloader": ("DpexDataLoader",),
    "dpex.diagnose.diagnosis": ("Diagnosis",),
    "dpex.diagnose.facts": ("CallFacts", "Facts"),
    "dpex.diagnose.verdict": ("Evidence", "Verdict"),
    "dpex.diagnose.what_if": ("Prediction",),
    "dpex.integrations": ("loader_behind", "log_to", "serve"),
    "dpex.measure.pool_reading": ("PoolReading",),
    "dpex.measure.sampling": ("FailedSample", "SlowIndex"),
    "dpex.measure.settings": ("Settings",),
    "dpex.options": ("ClusterConfig", "DeviceConfig", "MetricsConfig", "TLSConfig", "WorkerConfig"),
    "dpex.schedule.sample_policy": ("SamplePolicy",),
    "dpex.stats": ("LoaderStats", "StreamStats"),
    "dpex.transport.compact": ("compact",),
    "dpex.worker.async_dataset": ("AsyncDataset",),
    "dpex.worker.batch_seeding": ("batch_seed",),
    "dpex.worker.decoded_stream": ("decode_in_workers",),
}
"""The public names by the module that defines them; `dpex.errors` defines the others."""

__all__ = [
    "AsyncDataset",
    "AutotuneConfig",
    "BatchTimeoutError",
    "CacheError",
    "CallFacts",
    "ClusterConfig",
    "ClusterError",
    "Decision",
    "DeviceConfig",
    "Diagnosis",
    "DpexDataLoader",
    "DpexError",
    "Evidence",
    "Facts",
    "FailedSample",
    "InternalError",
    "IteratorClosedError",
    "IteratorInterruptedError",
    "LoaderStats",
    "MetricsConfig",
    "OptionError",
    "Outcome",
    "Policy",
    "PoolReading",
    "Prediction",
    "SamplePolicy",
    "SampleTimeoutError",
    "Settings",
    "ShareError",
    "ShippingError",
    "SlowIndex",
    "StateError",
    "StreamStats",
    "TLSConfig",
    "TooManySampleErrors",
    "Tuned",
    "UsageError",
    "Verdict",
    "WorkerConfig",
    "WorkerDiedError",
    "batch_seed",
    "cached",
    "compact",
    "decode_in_workers",
    "loader_behind",
    "log_to",
    "serve",
]
_HOME = dict.fromkeys(__all__, "dpex.errors") | {name: module for module, names in _NAMES.items() for name in names}

_ADAPTERS = ("accelerate", "lightning", "transformers")
"""Modules for frameworks. Each imports its framework, so dpex imports the module when it is first used."""


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name in _ADAPTERS:
        return importlib.import_module(f"dpex.{name}")
    raise AttributeError(f"module 'dpex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
