"""Constants of judging: when it is known what a decision brought. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class SettlingConstants(Constants):
    """How long a decision may take until what it asked for is running."""

    patience_s: float = constant(
        8.0,
        "seconds",
        1.0,
        60.0,
        "Until workers that were asked for run, windows count for nothing, for so long at most.",
        "Processes start within a second, actors within some; what takes longer may never come.",
        off=0.0,
    )
    longest_s: float = constant(
        80.0,
        "seconds",
        1.0,
        600.0,
        "The same while a decision is on trial.",
        "A cluster that starts nodes takes more than a minute; a trial without its workers would tell nothing.",
        off=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class EvaluationConstants(Constants):
    """What a decision brought, and how sure that is."""

    least_batches: int = constant(
        24,
        "batches",
        4,
        200,
        "A decision is judged by no fewer batches than these.",
        "The mean of 24 batches is known to a fifth where times vary as much as their mean.",
        off=1,
    )
    remote_skipped: int = constant(
        3,
        "batches",
        0,
        20,
        "Batches that remote workers make for each further one of them before a decision is judged.",
        "One each goes off at once, and they come one behind the other where the link is slow; by the next it is known "
        "how many the link carries.",
        off=0,
    )
    least_windows: int = constant(
        2,
        "windows",
        1,
        20,
        "And by no fewer windows than these.",
        "A standard error needs two.",
        off=1,
    )
    recent_windows: int = constant(
        12,
        "windows",
        2,
        100,
        "Windows under the present settings that are looked at.",
        "Some ten seconds: more would be of other work too often, fewer are too uncertain.",
    )
    long_windows: int = constant(
        40,
        "windows",
        2,
        1000,
        "Windows that say whether the present settings are slower than they should be.",
        "The rate of uneven work is known to some percent only after half a minute.",
    )
    trial_windows: int = constant(
        64,
        "windows",
        2,
        1000,
        "Windows of a trial that are kept.",
        "The longest trial takes a minute.",
    )
    few_batches: int = constant(
        6,
        "batches",
        1,
        100,
        "Before so many batches came nothing is said, not even that a decision was a disaster.",
        "Fewer may all have been begun before the decision.",
        off=1,
    )
    much_worse: float = constant(
        0.1,
        "share",
        0.0,
        1.0,
        "A trial is broken off after those few batches if it is slower by surely more than this.",
        "A smaller loss costs less than not knowing.",
        off=math.inf,
    )
    surely: float = constant(
        2.0,
        "standard errors",
        0.0,
        5.0,
        "What is put down to more workers must be beyond so many standard errors of what chance does.",
        "Chance alone is further away in one of forty cases only.",
        off=0.0,
    )
    enough: int = constant(
        4,
        "ratio",
        1,
        100,
        "So many times the batches that are needed settle it, however uncertain it is.",
        "Each further halving of the error takes four times as long.",
        off=1,
    )
    patience_s: float = constant(
        4.0,
        "seconds",
        0.5,
        60.0,
        "A trial lasts no longer than this, unless batches are slow.",
        "A bad setting must not be kept for longer than it takes to see that it is bad.",
        off=math.inf,
    )
    slow_patience_s: float = constant(
        2.0,
        "seconds",
        0.5,
        60.0,
        "The same while hardly any batch comes.",
        "Nothing that comes is a bad sign by itself.",
        off=math.inf,
    )
    slowest_batches: float = constant(
        3.0,
        "ratio",
        0.0,
        20.0,
        "A trial lasts so many times as long as the slowest batch known, at least.",
        "The next batch in turn may be one that was begun before; until it is there nothing of the decision shows.",
        off=0.0,
    )
    longest_s: float = constant(
        60.0,
        "seconds",
        4.0,
        600.0,
        "But no longer than this.",
        "A batch that takes minutes is no measure for anything.",
        off=math.inf,
    )
    even: float = constant(
        0.5,
        "ratio",
        0.0,
        2.0,
        "Where batches vary by less, a greater prefetch must show that it helps; else it is kept in doubt.",
        "The more they vary, the longer it takes to see what prefetch does, and the more it does.",
        off=0.0,
    )
    trial_doubt: float = constant(
        0.5,
        "standard errors",
        0.0,
        5.0,
        "By so much a trial of something unknown must have helped beyond what it needs.",
        "Nothing spoke for it before; among many trials some look good by chance.",
        off=0.0,
    )
    fewer_part: float = constant(
        0.25,
        "ratio",
        0.0,
        1.0,
        "A trial of fewer workers must bring only this part of `AutotuneConfig.gain`.",
        "The workers that are saved are worth something themselves.",
        off=1.0,
    )
    promised_part: float = constant(
        0.25,
        "ratio",
        0.0,
        1.0,
        "A growth must bring this part of what it promised, or `AutotuneConfig.gain`.",
        "The model is too hopeful where workers get in each other's way; a quarter is still worth having.",
        off=0.0,
    )
    paid_off: float = constant(
        0.5,
        "ratio",
        0.0,
        1.0,
        "A growth has paid off if each further worker brought this part of what those before it bring.",
        "Workers that bring half are no sign of a ceiling.",
        off=math.inf,
    )
    collapsed: float = constant(
        0.5,
        "ratio",
        0.0,
        1.0,
        "A rate below this part of what dearer batches explain is the decision's fault.",
        "A fall by half is beyond what the uncertainty of the new costs explains.",
        off=0.0,
    )
    clearly_more: float = constant(
        1.5,
        "ratio",
        1.1,
        5.0,
        "Workers can be seen to queue for something if there are so many times as many.",
        "With fewer, dearer batches may be chance.",
        off=math.inf,
    )
    mostly: float = constant(
        0.7,
        "ratio",
        0.0,
        1.0,
        "They queue if this part of what was added went into dearer batches.",
        "At a full storage all of it does; some of the batches were begun before.",
        off=math.inf,
    )
    far_fewer: float = constant(
        0.6,
        "ratio",
        0.0,
        1.0,
        "More workers are in each other's way if they surely make less than this part of what the former ones would.",
        "Chance and the start of workers take a part; a storage that has to seek takes far more.",
        off=0.0,
    )
    in_turn: float = constant(
        1.2,
        "ratio",
        0.0,
        20.0,
        "Nothing is said of that until the former ones would have made so many batches for each present one.",
        "All begin at once; if they are no faster together they end when there would be one for each of them.",
        off=math.inf,
    )
    not_much_slower: float = constant(
        0.6,
        "ratio",
        0.0,
        1.0,
        "They queue only if the rate did not fall below this part of what it was; else the work has changed.",
        "Queues alone cost nothing, and the seeks of a disk some; a fall beyond that is other work.",
        off=0.0,
    )
    no_faster: float = constant(
        1.15,
        "ratio",
        1.0,
        2.0,
        "They queue only if the rate did not rise beyond so many times what it was.",
        "More than that is worth half as many workers more.",
        off=math.inf,
    )
    drained: float = constant(
        0.2,
        "share",
        0.0,
        1.0,
        "If more than this part of the batches was taken from what lay ready, the rate is one of the stock.",
        "What lies ready comes and goes by some batches all the time.",
        off=math.inf,
    )


SETTLING = SettlingConstants()
EVALUATION = EvaluationConstants()
