"""What a loader tells of itself while it is used: its figures, its decisions, and why training waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dpex.loader.diagnosing import diagnosis_source
from dpex.loader.sizing import size_options

if TYPE_CHECKING:
    from dpex.autotune.types import Decision
    from dpex.diagnose.diagnosis import Diagnosis
    from dpex.diagnose.source import DiagnosisSource
    from dpex.loader.runtime import LoaderRuntime
    from dpex.stats import LoaderStats


class ReportingLoader:
    """What `DpexDataLoader` has of this."""

    _runtime: LoaderRuntime

    def stats(self) -> LoaderStats:
        """Return a snapshot of the latest iterator: workers by pool, batches in flight, bytes and times.

        The figures of an iterator that has ended stay, whether it ended by itself, by ``break`` or by `close`.

        Returns:
            A value that is safe to keep; see `LoaderStats`.
        """
        return self._runtime.last_stats.read()

    @property
    def decisions(self) -> list[Decision]:
        """What the tuner decided for this loader so far, and why; the oldest decision comes first.

        The list is empty for a loader that is not tuned. Its ``repr`` is a line for each. See `dpex.Decision`.
        """
        from dpex.loader.decision_list import DecisionList

        return DecisionList(self._runtime.decisions)

    @property
    def metrics_url(self) -> str | None:
        """Address of the live page, such as ``"http://127.0.0.1:9400/"``, from the first ``iter()`` until the loader is
        closed; None where no metrics are served."""
        return self._runtime.metrics_url

    def diagnose(self, *, reset: bool = False) -> Diagnosis:
        """Explain why training waits for data, if it does, where the time goes, and what would change it.

        It may be called from any thread, also in the middle of an epoch. With ``num_workers=0``, ``seeding="worker"``
        and no metrics, measuring begins with the first call, or with ``DPEX_DIAGNOSE``.

        Args:
            reset: Whether the next diagnosis is about what comes from now on. Otherwise it is about all epochs since
                the loader was made.

        Returns:
            A verdict with its evidence, what to do first, and what would end the wait. It shows itself as a report of
            one screen; ``full`` is the report with all tables.

        Examples:
            >>> import torch
            >>> from torch.utils.data import TensorDataset
            >>> from dpex import DpexDataLoader
            >>> with DpexDataLoader(TensorDataset(torch.arange(6)), num_workers=1) as loader:
            ...     for batch in loader:
            ...         pass
            ...     print(loader.diagnose().verdict.title)
            too early to say
        """
        source = self._diagnosis_source()
        self._runtime.is_diagnosed = True
        found = source.diagnose()
        if reset:
            self._runtime.counters.restart()
        return found

    def __repr__(self) -> str:
        from dpex.loader.shown import loader_text

        return loader_text(self) or object.__repr__(self)

    def _repr_html_(self) -> str:
        from dpex.loader.shown import loader_html

        return loader_html(self)

    def _diagnosis_source(self) -> DiagnosisSource:
        return diagnosis_source(self, self._runtime, size_options(self))
