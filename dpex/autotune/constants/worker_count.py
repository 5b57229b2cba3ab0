"""When the number of workers changes. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class WallsConstants(Constants):
    """Limits that the present settings exceed."""

    unplaced_windows: int = constant(
        2,
        "windows",
        1,
        10,
        "Remote workers are given up when the cluster has had no place for them in so many windows in a row.",
        "One window may fall between the end of one worker and the start of the next.",
    )


@dataclass(frozen=True, kw_only=True)
class GrowConstants(Constants):
    """Moves to what the model finds faster."""

    farther: float = constant(
        8.0,
        "ratio",
        1.0,
        64.0,
        "Where batches mostly wait, so many times as many workers are asked for at once at most.",
        "They may wait for something that they share: of a storage that slows with its readers a few show nothing.",
        off=64.0,
    )
    mostly_waits: float = constant(
        0.9,
        "share",
        0.0,
        1.0,
        "Batches mostly wait if they do for so much of a worker's time.",
        "Where more of it is computing the CPUs are the limit, and these are known.",
        off=1.0,
    )
    new_batches: int = constant(
        100,
        "batches",
        0,
        10_000,
        "As long as fewer batches were seen, one window is enough to ask for more workers.",
        "At first each second under too few workers is lost, and a mistake is undone soon.",
        off=0,
    )
    great_gain: float = constant(
        2.0,
        "ratio",
        1.0,
        10.0,
        "One window is enough for a rate that is so many times the present one.",
        "Noise does not double a rate.",
        off=math.inf,
    )
    clear_gain: float = constant(
        1.2,
        "ratio",
        1.0,
        2.0,
        "More windows must agree for a rate that is less than so many times the present one.",
        "Rates of successive windows of steady work vary by some percent; a fifth is far beyond that.",
        off=1.0,
    )
    votes: int = constant(
        2,
        "windows",
        1,
        10,
        "Windows in a row that must agree on a clear gain.",
        "A single window may have had a pause of the storage or of the training loop in it.",
        off=1,
    )
    votes_for_little: int = constant(
        3,
        "windows",
        1,
        10,
        "Windows in a row that must agree on a small gain.",
        "A small gain takes long to pay for a change, and noise may look like one.",
        off=1,
    )
    early_s: float = constant(
        1.0,
        "seconds",
        0.0,
        10.0,
        "In the first seconds one window less must agree.",
        "Epochs may be short; windows are, too, as long as little is known.",
        off=0.0,
    )
    as_fast: float = constant(
        0.95,
        "ratio",
        0.5,
        1.0,
        "Workers that there are stay if the settings with them are expected to have this part of the best rate.",
        "A worker that goes and is missed costs a start; what is too much is given back later.",
        off=math.inf,
    )
    out_of_turn: float = constant(
        0.03,
        "share",
        0.0,
        0.5,
        "No memory of batches goes to workers while only the next batch in turn is missing for this share of the time.",
        "It is the share from which a trial may pay.",
        off=math.inf,
    )
    lasted_s: float = constant(
        4.0,
        "seconds",
        0.0,
        60.0,
        "A number of workers that lasted so long and is too few now is remembered as too few.",
        "What lasted less was judged too few while it was learnt, and tells nothing of how the work changes.",
        off=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class ShrinkConstants(Constants):
    """Capacity that is given back. `AutotuneConfig.shrink_after` says how many windows must agree."""

    steps: int = constant(
        10,
        "workers",
        1,
        100,
        "One of so many workers, at least, must become free.",
        "Workers are stopped and started again; a change of less is not worth that.",
        off=1_000_000_000,
    )
    much_less: float = constant(
        0.75,
        "ratio",
        0.0,
        1.0,
        "With no more than this part of the workers, `AutotuneConfig.gain` may be lost, not only `wait_goal`.",
        "A quarter of the workers is worth some percent of the rate.",
        off=0.0,
    )
    pause_s: float = constant(
        1.5,
        "seconds",
        0.0,
        60.0,
        "Nothing is given back so soon after another change.",
        "Batches that were ready before it hide for so long how many are needed.",
        off=0.0,
    )
    ample: float = constant(
        1.5,
        "ratio",
        1.0,
        10.0,
        "A capacity of so many times the demand is beyond doubt: half as many windows must agree.",
        "It leaves room for an estimate that is wrong by a third.",
        off=math.inf,
    )
    uneven: float = constant(
        0.25,
        "ratio",
        0.0,
        2.0,
        "Batches whose times vary by this part of their mean are uneven, and must be seen for longer.",
        "Even batches show in some windows what they cost; of uneven ones the slow may yet come.",
        off=math.inf,
    )
    spread: float = constant(
        0.5,
        "ratio",
        0.0,
        2.0,
        "If they vary by more than this, twice as many windows must agree.",
        "The mean of a window of 25 such batches is known to a tenth only.",
        off=math.inf,
    )
    new_batches: int = constant(
        100,
        "batches",
        0,
        10_000,
        "Even batches that must have been seen, where the capacity is not beyond doubt.",
        "The first batches find cold caches, and a mean of few is uncertain.",
        off=0,
    )
    calm_s: float = constant(
        10.0,
        "seconds",
        0.0,
        600.0,
        "Time since the work began, or changed, before anything of uneven work is given back.",
        "A slow stretch of shards or storage lasts for seconds, and must have had its turn.",
        off=0.0,
    )
    calm_batches: int = constant(
        300,
        "batches",
        0,
        100_000,
        "Batches that must have been seen then.",
        "Where some fifty batches in a row are alike, these are six stretches.",
        off=0,
    )
    restless: int = constant(
        2,
        "changes",
        1,
        10,
        "From so many recent changes of the work on, nothing is beyond doubt any more.",
        "Work that came back once will come back again.",
        off=1_000_000_000,
    )
    worth_bytes: float = constant(
        64e6,
        "bytes",
        0.0,
        1e9,
        "Memory of batches in flight that is worth a change by itself.",
        "It is what one more worker process takes.",
        off=math.inf,
    )


WALLS = WallsConstants()
GROW = GrowConstants()
SHRINK = ShrinkConstants()
