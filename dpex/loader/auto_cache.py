"""``cache="auto"``: decide between two epochs if samples are cached from the next one on, and judge what it brought.

After an epoch the diagnosis knows what a sample costs and how large it is. It predicts the rate with `dpex.cached` and
the rate with a longer prefetch, which takes memory as well. The cache is switched on if it is the faster one and all
samples fit into half of the free memory. The epoch that fills it is not judged. If the next one is not faster than the
epoch before the decision, or the dataset turns out to be random, the cache is switched off permanently.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from dpex.autotune.types import Decision, Outcome, Settings
from dpex.errors import CacheError, OptionError
from dpex.measure.sums import Sums
from dpex.system.clock import Clock, monotonic

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis, DiagnosisSource

logger = logging.getLogger("dpex")

WORTH = 0.05
"""A rate that is higher by less may be chance."""


class AutoCache:
    """The cache of one loader's dataset. The training thread calls `before_pass`.

    Attributes:
        dataset: The dataset of the next pass: the user's, or a cache around it.
        decisions: The decision to cache, with its outcome; empty if there was none.
    """

    def __init__(self, dataset: Any, clock: Clock = monotonic) -> None:
        self.dataset = self._users = dataset
        self.decisions: list[Decision] = []
        self._clock, self._began_at = clock, clock()
        self._before = Sums()
        self._is_settled = False

    def before_pass(self, source: DiagnosisSource, settings: Settings) -> None:
        """Decide from the counts of all passes without a cache, and judge the last pass with it.

        Args:
            source: The counts of the loader.
            settings: Workers and prefetch of the next pass.
        """
        if self._is_settled:
            return
        now = source.book.read()
        if not self.decisions:
            self._decide(now, source.diagnose(now), settings)
        elif (last := now.since(self._before)).batches:
            self._judge(last)
        self._before = now

    def _decide(self, sums: Sums, found: Diagnosis, settings: Settings) -> None:
        rates = {one.kind: one for one in found.predictions if one.kind in ("cached", "prefetch")}
        one = rates.get("cached")
        if one is None or ("prefetch" in rates and rates["prefetch"].rate > one.rate):
            return
        from dpex.cache.dataset import cached
        from dpex.cache.memory_store import room
        from dpex.diagnose.what_if import deterministic

        samples, sample_bytes = len(self._users), sums.batch_bytes * sums.batches / max(1, sums.samples)
        needed, budget = int(samples * sample_bytes), room() // 2
        if needed > budget:
            self._settle(f"{needed:,} bytes of samples do not fit into half of the free memory, {budget:,} bytes")
            return
        upto = deterministic(found.facts)[0]
        try:
            self.dataset = cached(self._users, upto=upto, memory=budget, on_random="skip")
        except (CacheError, OptionError) as error:
            self._settle(str(error))
            return
        text = (
            f"Samples are cached from now on, as by {one.change}: preparing them takes most of the time, and "
            f"{samples:,} samples of {sample_bytes / 1e6:.2g} MB fit into memory"
        )
        rate, evidence = sums.batches / sums.wall_s, {"samples": float(samples), "sample_bytes": sample_bytes}
        self.decisions.append(
            Decision(
                at=self._clock() - self._began_at,
                old=settings,
                new=settings,
                reason="cache",
                text=text,
                evidence={**evidence, "rate": rate},
                predicted_rate=one.rate,
                predicted_wait=one.wait,
            )
        )
        logger.info("%s. %.3g batches/s are expected instead of %.3g", text, one.rate, rate)

    def _judge(self, last: Sums) -> None:
        """Conclude from the first pass that was read from the cache."""
        pools = last.pools.values()
        hits, misses = sum(pool.cache_hits for pool in pools), sum(pool.cache_misses for pool in pools)
        is_random = self.dataset.is_random
        if misses > hits and not is_random:
            return  # it is being filled
        decision, rate = self.decisions[0], last.batches / last.wall_s
        is_kept = not is_random and rate > (1.0 + WORTH) * decision.evidence["rate"]
        wait = (last.wait_s + last.transfer_s) / last.wall_s
        outcome = Outcome(rate=rate, wait=wait, kept=is_kept, at=self._clock() - self._began_at)
        self.decisions[0] = replace(decision, outcome=outcome)
        why = "the dataset is random" if is_random else f"{rate:.3g} batches/s"
        self._settle(f"{why}, {decision.predicted_rate:.3g} expected", is_kept=is_kept)

    def _settle(self, why: str, *, is_kept: bool = False) -> None:
        self._is_settled = True
        if not is_kept:
            self.dataset = self._users
        logger.info("cache='auto' %s: %s", "keeps the cache" if is_kept else "leaves samples uncached", why)
