"""What dpex would have given a run that was measured with torch's own loader, and the command to have it. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dpex.autotune.types import Settings
from dpex.diagnose.report import percent
from dpex.diagnose.what_if import WORTH, Prediction, present

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis


@dataclass(frozen=True, kw_only=True)
class WithDpex:
    """``sentence``; the setting, rate (batches per second) and stall (0 to 1) predicted, None where nothing is or the
    present setting is as good; the command, "" where there is nothing to gain."""

    sentence: str
    settings: Settings | None = None
    rate: float | None = None
    stall: float | None = None
    command: str = ""

    def to_dict(self) -> dict[str, Any]:
        """For programs."""
        return vars(self) | {"settings": None if self.settings is None else vars(self.settings)}


def with_dpex(diagnosis: Diagnosis, script: Sequence[str], *, is_stream: bool) -> WithDpex:
    """By the tuner's model, as `WhatIf` has asked it; script: the words of the command line after ``dpex run``.

    A loader of an iterable dataset (``is_stream``) keeps its workers there, and only its depth is tuned.
    """
    what_if = diagnosis.what_if
    if diagnosis.verdict.cause == "too-early" or what_if is None:
        return WithDpex(sentence="with dpex: too little was seen to predict anything")
    now = present(diagnosis.facts)
    chosen = _best([one for one in what_if.predictions if _is_tuned(one, now, is_stream)])
    if chosen is None or what_if.stall - chosen.stall < WORTH:
        stays = f"the stall stays at about {percent(what_if.stall)} ({now})"
        why = "an IterableDataset keeps its number of workers, and no depth" if is_stream else "no setting"
        return WithDpex(
            sentence=f"with dpex: {why} loses less; {stays}",
            rate=what_if.rate,
            stall=what_if.stall,
        )
    more = ["--also-in-process"] if not now.workers else []
    command = shlex.join(["dpex", "run", *more, *script])
    span = f"{100 * chosen.low:.0f} to {percent(chosen.high)}"
    condition = f", if {chosen.condition}" if chosen.condition else ""
    return WithDpex(
        sentence=(
            f"with dpex: {chosen.settings} instead of {now}: the stall falls from {percent(what_if.stall)} to about "
            f"{percent(chosen.stall)} ({span}), {chosen.rate:.3g} batches/s instead of {what_if.rate:.3g}{condition}"
        ),
        settings=chosen.settings,
        rate=chosen.rate,
        stall=chosen.stall,
        command=command,
    )


def _is_tuned(prediction: Prediction, now: Settings, is_stream: bool) -> bool:
    if prediction.kind not in ("workers", "depth"):
        return False
    return not is_stream or (now.workers > 0 and prediction.settings.workers == now.workers)


def _best(predictions: Sequence[Prediction]) -> Prediction | None:
    """The least stall, within what is worth it the fewest workers and the least depth."""
    if not predictions:
        return None
    least = min(one.stall for one in predictions)
    good = [one for one in predictions if one.stall <= least + WORTH / 3]
    return min(good, key=lambda one: (one.settings.workers, one.settings.depth))
