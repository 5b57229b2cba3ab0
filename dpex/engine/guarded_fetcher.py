"""torch's fetcher for in-process iterators, for batches that are made although some samples cannot be had."""

from __future__ import annotations

from typing import Any

from dpex._torch import MapDatasetFetcher
from dpex.core.instructions import Instruction, Raise, Say
from dpex.core.sample_policy import SamplePolicy
from dpex.engine.sample_errors import NOBODY, SampleErrors
from dpex.system.user_warnings import warn
from dpex.worker.sample_guard import SampleGuard


class GuardedFetcher(MapDatasetFetcher):
    """See the module. ``errors``: the samples that failed."""

    def __init__(self, torchs: Any, policy: SamplePolicy, seed: int) -> None:
        vars(self).update(vars(torchs))
        self._out: list[Instruction] = []
        self._guard = SampleGuard(self.dataset, policy, seed)
        self._made = 0
        self.errors = SampleErrors(policy, self._out)

    def fetch(self, possibly_batched_index: Any) -> Any:
        """See torch's."""
        guard, index = self._guard, possibly_batched_index
        data = guard.samples(index) if self.auto_collation else guard.sample(index)
        self._made += 1
        self.errors.made((0, self._made), len(data) if self.auto_collation else 1, guard.taken())
        self._perform()
        return self.collate_fn(data)

    def _perform(self) -> None:
        while self._out:
            told = self._out.pop(0)
            if isinstance(told, Say):
                warn(told.text)
            elif isinstance(told, Raise):
                raise told.error


def errors_of(fetcher: Any) -> SampleErrors:
    """Those of such a fetcher; nobody's of any other."""
    return fetcher.errors if isinstance(fetcher, GuardedFetcher) else NOBODY
