"""Decisions of the law in sentences. PURE."""

from __future__ import annotations

from collections.abc import Mapping

from dpex.autotune.law.evidence import Record
from dpex.autotune.law.model import Model
from dpex.autotune.types import Reason, Settings


def evidence(model: Model, record: Record) -> dict[str, float]:
    """The measurements that a decision rests on, by name."""
    return {
        "service_s": model.local.service_s,
        "cpu_s": model.local.cpu_s,
        "step_s": model.step_s,
        "wait": record.wait,
        "cpus": model.cpus,
        "others": model.others,
    }


def decided(old: Settings, new: Settings, reason: Reason, known: Mapping[str, float]) -> str:
    """What changes, and why."""
    return f"{reason}: {old} -> {new} {dict(known)}"
