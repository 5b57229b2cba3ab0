"""From a loader's counts to its diagnosis. It is a module of its own, as every loader with metrics imports it.

It needs no loader, which may have ended. Any thread may call it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Protocol

from dpex.autotune.types import Decision, Settings
from dpex.diagnose.facts import Facts, Subject
from dpex.engine.snapshots import LoaderCounters
from dpex.measure.samples import GpuUse
from dpex.measure.sums import Sums
from dpex.system.cpus import local_ranks, usable_cpus

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis


def facts_of(account: Sums, subject: Subject) -> Facts:
    """Return the counts and what is known without measuring as one value."""
    known = {one.name: getattr(subject, one.name) for one in fields(Subject)}
    cpus = max(0.5, usable_cpus() / local_ranks(os.environ))
    return account.narrowed(Facts, **known, prefetch=account.prefetch or 1, cpus=cpus)


class HasTuner(Protocol):
    """A tuner as it is read here. settings: the present ones. gpu_use: NVML's readings meanwhile."""

    settings: Settings
    gpu_use: GpuUse | None

    @property
    def decisions(self) -> Sequence[Decision]:
        """All so far."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisSource:
    """A loader's counts, its description, and its tuner if it has one."""

    book: LoaderCounters
    subject: Subject
    tuner: HasTuner | None = None

    def diagnose(self, account: Sums | None = None) -> Diagnosis:
        """Conclude from these counts, or from all in the book. Takes 2 ms of CPU."""
        from dpex.diagnose.diagnosis import diagnose

        subject = self.subject
        if self.tuner is not None:
            decisions = tuple(self.tuner.decisions)
            subject = replace(subject, is_tuned=True, decisions=decisions, gpu_use=self.tuner.gpu_use)
        return diagnose(facts_of(account or self.book.read(), subject))
