"""Situations for tables of policies: four CPUs, four local workers with a prefetch of 8, and batches of 50 ms."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.felt import FeltSample
from dpex.autotune.model import Estimate, Flow
from dpex.autotune.planner import Bounds, Plan
from dpex.autotune.situation import Outlook, Recent, Situation
from dpex.autotune.types import Sample, Settings
from dpex.measure.samples import MachineSample, PoolSample

FOUR = Settings(local=4, prefetch=8)
EIGHT = Settings(local=8, prefetch=16)
WORK = Estimate(step_s=0.01, step_cpu_s=0.001, own_s=0.0002, here_s=0.06, cpu_s=0.01, wait_s=0.04, far_s=0.05, cpus=4.0)
CONFIG = AutotuneConfig()


def plan(settings: Settings, rate: float = 80.0, *, capacity: float = 0.0, demand: float = 100.0) -> Plan:
    """What the model expects; ``capacity``: the rate where it is left out."""
    flow = Flow(demand=demand, capacity=capacity or rate, slowdown=1.0)
    return Plan(settings=settings, rate=rate, wait=max(0.0, 1.0 - rate / demand), flow=flow)


def sample(now: Settings = FOUR, *, machine: dict[str, Any] | None = None, **changes: Any) -> Sample:
    """A window of a second that ends at 100 s; for a tenth of it the training loop waits."""
    pool = PoolSample(requested=now.local, running=now.local, tickets=60, load_s=2.0, cpu_s=1.0, queued_s=0.0)
    known = {"batches": 60, "wait_s": 0.1, "work_s": 0.9, "local": pool}
    seen = MachineSample(**{"cpus": 4.0, "trainer_cpu_s": 0.1} | (machine or {}))
    return Sample(**{"at": 100.0, "seconds": 1.0, "settings": now, "machine": seen} | known | changes)


def situation(
    now: Settings = FOUR,
    best: Plan | None = None,
    here: Plan | None = None,
    *,
    recent: dict[str, Any] | None = None,
    window: dict[str, Any] | None = None,
    work: dict[str, Any] | None = None,
    **changes: Any,
) -> Situation:
    """Steady work, seen for long, of which a tenth of the time is lost to loading."""
    ten = {"windows": 10, "seconds": 10.0, "batches": 600, "rate": 60.0, "lost": 0.1, "wait": 0.1, "busy": 0.5}
    present = here or plan(now, 60.0)
    outlook = Outlook(best=best or present, here=present)
    estimate = replace(WORK, **work or {})
    seen = sample(now, **window or {})
    known: dict[str, Any] = {
        "config": CONFIG,
        "sample": seen,
        "felt": FeltSample(sample=seen),
        "recent": Recent(**ten | (recent or {})),
        "work": estimate,
        "unlimited": estimate,
        "bounds": Bounds(local=16, remote=0, prefetch=4096),
        "think": lambda: outlook,
        "long_rate": 60.0,
        "rate_error": 0.01,
        "batch_bytes": 1e5,
        "variation": 0.05,
        "tickets": 600,
        "asked_at": 50.0,
        "explored_at": 50.0,
        "explore_pause_s": 20.0,
    }
    return Situation(**known | changes)
