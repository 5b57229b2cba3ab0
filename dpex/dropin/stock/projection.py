"""What dpex would have given a run that was measured with torch's own loader, and the command to have it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.autotune.types import Settings
from dpex.core.readable import percent, rounded
from dpex.diagnose.measured_work import present
from dpex.diagnose.what_if import WORTH, Prediction

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis


@dataclass(frozen=True, kw_only=True)
class WithDpex:
    """``sentence``; the setting, rate (batches per second) and wait (0 to 1) predicted, None where nothing is or the
    present setting is as good; the command, "" where there is nothing to gain."""

    sentence: str
    settings: Settings | None = None
    rate: float | None = None
    wait: float | None = None
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return vars(self) | {"settings": None if self.settings is None else vars(self.settings)}


def with_dpex(diagnosis: Diagnosis, script: Sequence[str], *, is_stream: bool) -> WithDpex:
    """By the tuner's model, as `WhatIf` has asked it; script: the words of the command line after ``dpex run``.

    A loader of an iterable dataset (``is_stream``) keeps its workers there, and only its prefetch is tuned.
    """
    what_if = diagnosis.what_if
    if diagnosis.verdict.cause == "too-early" or what_if is None:
        return WithDpex(sentence="With dpex: too little was measured to predict anything.")
    now = present(diagnosis.facts)
    chosen = _best([one for one in what_if.predictions if _is_tuned(one, now, is_stream)])
    if chosen is None or what_if.wait - chosen.wait < WORTH:
        stays = f"the wait stays at about {percent(what_if.wait)} ({now})"
        why = "an IterableDataset keeps its number of workers, and no prefetch" if is_stream else "no setting"
        return WithDpex(
            sentence=f"With dpex: {why} loses less; {stays}.",
            rate=what_if.rate,
            wait=what_if.wait,
        )
    more = ["--also-in-process"] if not now.workers else []
    command = shlex.join(["dpex", "run", *more, *script])
    span = f"{100 * chosen.low:.0f} to {percent(chosen.high)}"
    condition = f", if {chosen.condition}" if chosen.condition else ""
    return WithDpex(
        sentence=(
            f"With dpex: {chosen.settings} instead of {now}: the wait falls from {percent(what_if.wait)} to about "
            f"{percent(chosen.wait)} ({span}), {rounded(chosen.rate)} batches/s instead of {rounded(what_if.rate)}"
            f"{condition}."
        ),
        settings=chosen.settings,
        rate=chosen.rate,
        wait=chosen.wait,
        command=command,
    )


def _is_tuned(prediction: Prediction, now: Settings, is_stream: bool) -> bool:
    if prediction.kind not in ("workers", "prefetch"):
        return False
    return not is_stream or (now.workers > 0 and prediction.settings.workers == now.workers)


def _best(predictions: Sequence[Prediction]) -> Prediction | None:
    """The least wait, within what is worth it the fewest workers and the least prefetch."""
    if not predictions:
        return None
    least = min(one.wait for one in predictions)
    good = [one for one in predictions if one.wait <= least + WORTH / 3]
    return min(good, key=lambda one: (one.settings.workers, one.settings.prefetch))
