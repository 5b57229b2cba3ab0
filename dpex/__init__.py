"""dpex: torch's DataLoader with workers on this machine and on a Ray cluster, tuned and measured while training runs.

Names are resolved when they are first used: importing dpex starts nothing and imports neither Ray nor
prometheus-client.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpex.autotune.config import AutotuneConfig
    from dpex.dataloader import DpexDataLoader
    from dpex.errors import (
        ClusterError,
        DpexError,
        FixedWorkersError,
        InterruptedSamplerError,
        IteratorClosedError,
        OptionError,
        ShippingError,
        WorkerDiedError,
    )
    from dpex.stats import LaneStats, LoaderStats
    from dpex.worker.threads import ticket_seed

__version__ = "0.1.0"

_HOME = {
    "AutotuneConfig": "dpex.autotune.config",
    "DpexDataLoader": "dpex.dataloader",
    "ClusterError": "dpex.errors",
    "DpexError": "dpex.errors",
    "FixedWorkersError": "dpex.errors",
    "InterruptedSamplerError": "dpex.errors",
    "IteratorClosedError": "dpex.errors",
    "OptionError": "dpex.errors",
    "ShippingError": "dpex.errors",
    "WorkerDiedError": "dpex.errors",
    "LaneStats": "dpex.stats",
    "LoaderStats": "dpex.stats",
    "ticket_seed": "dpex.worker.threads",
}

__all__ = [
    "AutotuneConfig",
    "ClusterError",
    "DpexDataLoader",
    "DpexError",
    "FixedWorkersError",
    "InterruptedSamplerError",
    "IteratorClosedError",
    "LaneStats",
    "LoaderStats",
    "OptionError",
    "ShippingError",
    "WorkerDiedError",
    "ticket_seed",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'dpex' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
