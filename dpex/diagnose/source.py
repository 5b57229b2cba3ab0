"""All that a loader's diagnosis is made from, without the loader: it may be gone by then. From any thread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from dpex.autotune.types import Decision, Settings
from dpex.diagnose.gathered import Context, facts_of
from dpex.engine.loader_counters import LoaderCounters
from dpex.measure.gpu_use import GpuUse
from dpex.measure.sums import Sums

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis


class HasTuner(Protocol):
    """What of a tuner is read. settings: those of now. gpu_use: what NVML said meanwhile."""

    settings: Settings
    gpu_use: GpuUse | None

    @property
    def decisions(self) -> Sequence[Decision]:
        """All so far."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisSource:
    """A loader's book, what is known of it without measuring, and its tuner if it has one."""

    book: LoaderCounters
    context: Context
    tuner: HasTuner | None = None

    def diagnose(self, account: Sums | None = None) -> Diagnosis:
        """What can be concluded from these counts, or from all in the book; 50 to 100 ms of CPU."""
        from dpex.diagnose.diagnosis import diagnose

        account = account or self.book.read()
        note = "" if account.batches else self.context.note
        context = replace(self.context, note=note)
        if self.tuner is not None:
            decisions = tuple(self.tuner.decisions)
            context = replace(context, is_tuned=True, decisions=decisions, gpu_use=self.tuner.gpu_use)
        return diagnose(facts_of(account, context))
