"""Constants of what is learnt: from a trial, from what ends it early, and from queues on a link. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class TrialsConstants(Constants):
    """What a trial teaches, and what ends it early."""

    held_up_s: float = constant(
        1.0,
        "seconds",
        0.1,
        60.0,
        "One batch holds up all others if none has come for so long.",
        "A shorter gap ends by itself before a greater prefetch could be filled.",
        off=math.inf,
    )
    held_up_times: float = constant(
        2.0,
        "ratio",
        1.0,
        20.0,
        "And for so many times as long as the slowest batch known takes.",
        "A batch as slow as others before it was reckoned with.",
        off=1.0,
    )
    blocked: float = constant(
        0.5,
        "share",
        0.0,
        1.0,
        "And if later batches are ready for this share of the window.",
        "Where nothing is ready, it is not the order that holds the others up.",
        off=0.0,
    )
    idle: float = constant(
        0.5,
        "share",
        0.0,
        1.0,
        "And if workers are at work for less than this share of it.",
        "Workers that are busy would not make more with a greater prefetch.",
        off=math.inf,
    )
    eager: int = constant(
        4,
        "ratio",
        1,
        20,
        "Trials come so many times as often as `AutotuneConfig.explore_s` says at first, and after one that helped.",
        "At first most is unknown, and what helped once may help again.",
        off=1,
    )
    no_way_back: float = constant(
        2.0,
        "ratio",
        1.0,
        100.0,
        "Where a batch takes surely so many times what it took under the same settings before a failed trial, the work "
        "has changed meanwhile.",
        "By less than this, caches that the trial left cold and other people's programs may make the same work dearer.",
        off=math.inf,
    )
    restless_s: float = constant(
        30.0,
        "seconds",
        0.0,
        600.0,
        "Work that changed more than once in this time may do so again.",
        "Ups and downs within half a minute are parts of the same work.",
        off=0.0,
    )
    recurring: int = constant(
        2,
        "changes",
        1,
        10,
        "From so many changes in that time on they are ups and downs of the same work: what failed once will again.",
        "One change is a new work, of which nothing is known.",
        off=1_000_000_000,
    )
    disappointing: float = constant(
        0.85,
        "ratio",
        0.0,
        1.0,
        "A growth that brings less than this part of what is expected by now shows that something else is the limit.",
        "The model may be wrong by a tenth without there being a limit.",
        off=0.0,
    )
    spread: float = constant(
        0.5,
        "ratio",
        0.0,
        5.0,
        "But not where batches vary by more than this.",
        "Rates of so uneven batches are too uncertain to say so.",
        off=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class CeilingConstants(Constants):
    """Batches that queue on the way from remote workers: the link carries no more."""

    jam_per_worker: float = constant(
        0.25,
        "batches",
        0.0,
        10.0,
        "The link is full if so many batches queue on it for each remote worker.",
        "Batches that are under way at the same time by chance are fewer.",
        off=math.inf,
    )
    least_jam: float = constant(
        2.0,
        "batches",
        0.0,
        100.0,
        "And no fewer than so many in all.",
        "One batch is always under way, and another may just have been made.",
        off=0.0,
    )
    jammed_windows: int = constant(
        3,
        "windows",
        1,
        20,
        "Windows that must tell so together.",
        "Batches count as work when they come, so that a single window tells of earlier work, too.",
        off=1,
    )
    jammed_batches: int = constant(
        16,
        "batches",
        0,
        1000,
        "With so many remote batches in them these windows may be short.",
        "The mean of sixteen is known well enough to tell a queue from none.",
        off=0,
    )
    jammed_s: float = constant(
        2.0,
        "seconds",
        0.0,
        60.0,
        "Otherwise they must last for so long.",
        "On a slow link few batches come.",
        off=0.0,
    )
    jammed_services: float = constant(
        8.0,
        "ratio",
        0.0,
        100.0,
        "And for so many times as long as a worker takes for a batch.",
        "What workers are at is known only once it is made.",
        off=0.0,
    )
    surpassed: float = constant(
        1.15,
        "ratio",
        1.0,
        10.0,
        "The link carries more than was believed if so many times as many batches came, in as many as show a queue.",
        "The mean of sixteen times is known to some percent where they are alike, and a full link does not widen.",
        off=math.inf,
    )


TRIALS = TrialsConstants()
CEILING = CeilingConstants()
