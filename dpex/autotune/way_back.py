"""Whether settings that were gone back to bring again what they had brought before. PURE.

A trial during which the work changes is blamed for what the change does. Settings that were held before tell them
apart: if the trial was to blame, a batch takes with them what it took before it.
"""

from __future__ import annotations

from dpex.autotune import wording
from dpex.autotune.constants.judging import EVALUATION
from dpex.autotune.constants.learning import TRIALS
from dpex.autotune.estimator import WorkEstimator
from dpex.autotune.evaluation import FailedTrial
from dpex.autotune.types import Decision, Sample
from dpex.autotune.window_record import WindowRecord


class WayBack:
    """What came in since a decision was undone.

    Args:
        failed: what was undone.
        undo: the decision that did so.
    """

    def __init__(self, failed: FailedTrial, undo: Decision) -> None:
        more = undo.new.workers / max(1, failed.decision.old.workers)
        self._cost_s = failed.cost_before_s * max(1.0, more)
        self._begun_before = undo.old.workers
        self._since = WindowRecord()
        self._is_open = self._cost_s > 0.0 and undo.new.workers > 0

    def add(self, sample: Sample, lost_s: float, work: WorkEstimator) -> tuple[str, ...]:
        """Take a window in; in words what of the work has changed, if what was before did not come back.

        Batches that were begun before the undo do not count. Says so once at most, and nothing after as many batches
        as any decision is judged by.
        """
        if not self._is_open:
            return ()
        if self._begun_before > 0:
            self._begun_before -= sample.local.tickets + sample.remote.tickets
            return ()
        since = self._since
        since.add(sample, lost_s)
        if since.tickets < EVALUATION.few_batches:
            return ()
        chance = 1.0 + EVALUATION.surely * work.uncertainty(since.tickets)
        has_changed = since.cost_s > TRIALS.no_way_back * chance * self._cost_s
        self._is_open = not has_changed and since.tickets < EVALUATION.least_batches
        return (wording.level("time of a batch", self._cost_s, since.cost_s),) if has_changed else ()
