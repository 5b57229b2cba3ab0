"""When something is tried that the model does not know. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class CommonConstants(Constants):
    """What several policies ask of a window."""

    starved: float = constant(
        0.03,
        "share",
        0.0,
        0.2,
        "From this share of the time lost to loading on, a trial of something that the model does not know may pay.",
        "A trial costs some percent for some seconds; below 3 % there is no more than that to be won.",
        off=0.0,
    )
    full: float = constant(
        0.85,
        "share",
        0.5,
        1.0,
        "The CPUs are full if workers and training loop use more than this share of them.",
        "Threads that move between CPUs leave some time unused even where every CPU is wanted.",
        off=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class InProcessConstants(Constants):
    """Batches made in the training process."""

    windows: int = constant(
        3,
        "windows",
        1,
        20,
        "Windows under the present settings before in-process loading is tried.",
        "A trial is compared with these windows; fewer than three have no standard error worth the name.",
        off=1,
    )
    after_s: float = constant(
        1.0,
        "seconds",
        0.0,
        10.0,
        "Time under the present settings before in-process loading is tried.",
        "The first windows are short, and those in which workers warm up do not count.",
        off=0.0,
    )
    warm_up_s: float = constant(
        0.3,
        "seconds",
        0.0,
        5.0,
        "What workers make in so much time at first is not compared with in-process loading.",
        "They touch their memory for the first time, at two thirds of their later rate where batches take 0.3 ms.",
        off=0.0,
    )
    warming_up: float = constant(
        0.2,
        "share",
        0.0,
        1.0,
        "In-process loading that is slower by no more than this at first is looked at a second time.",
        "It maps the pages of its data for the first time, at 0.7 to 0.9 of its later rate for half a second.",
        off=0.0,
    )
    many_batches: int = constant(
        100,
        "batches",
        10,
        10_000,
        "So many batches do instead of that time, where batches cost next to nothing.",
        "A hundred batches of a tenth of a millisecond come in a single short window.",
        off=1_000_000_000,
    )
    windows_if_free: int = constant(
        2,
        "windows",
        1,
        20,
        "Windows that are needed even then.",
        "A loss per batch has a standard error from two windows on.",
        off=1,
    )
    longest_trial_s: float = constant(
        0.5,
        "seconds",
        0.01,
        10.0,
        "In-process loading is tried only if the batches of a trial take less than this in the training process.",
        "If the trial fails, this is what it costs.",
        off=math.inf,
    )
    free_s: float = constant(
        0.0001,
        "seconds",
        0.0,
        0.001,
        "A batch that takes no longer costs so little that in-process loading is tried first and soon.",
        "Handing a batch over costs 0.02 to 0.2 ms itself.",
        off=0.0,
    )
    most_waiting: float = constant(
        0.3,
        "share",
        0.0,
        1.0,
        "It is tried only if a batch waits for less than this share of its time.",
        "Waits of workers overlap, and those of the training process do not.",
        off=math.inf,
    )
    least: float = constant(
        0.75,
        "ratio",
        0.0,
        1.0,
        "It is tried if the model expects at least this part of the present rate of it.",
        "A worker's times hold more than making the batch; a quarter is the room that is left for that.",
        off=1.0,
    )
    least_if_full: float = constant(
        0.55,
        "ratio",
        0.0,
        1.0,
        "The same where workers fill the CPUs.",
        "Two workers that fill two CPUs make twice as much as one process, unless each more than doubles the other's "
        "time, which needs no trial. They make less than that where handing batches over takes a good part.",
        off=0.75,
    )
    least_if_copying: float = constant(
        0.25,
        "ratio",
        0.0,
        1.0,
        "The same where batches are only copied.",
        "All workers share one memory, so that the difference is greatest here.",
        off=0.75,
    )
    copied_per_s: float = constant(
        1e9,
        "bytes/s",
        1e8,
        1e11,
        "From so many bytes per second of making on, a batch is taken to be only copied.",
        "Memory is copied at several GB/s, and hardly any transform makes 1 GB/s.",
        off=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class PrefetchConstants(Constants):
    """A greater prefetch."""

    times: int = constant(
        4,
        "ratio",
        2,
        16,
        "So many times the present prefetch is tried.",
        "Doubling takes several trials of seconds each, and memory is cheap until it is used.",
        off=1,
    )
    most_per_worker: int = constant(
        32,
        "batches",
        2,
        256,
        "The greatest prefetch for each worker that a trial goes to.",
        "Twice the deepest that the model compares: trials are for what the model does not know.",
    )
    out_of_turn: float = constant(
        0.03,
        "share",
        0.0,
        0.5,
        "Only the next batch in turn must be missing for more than this share of the time.",
        "It is the share from which a trial may pay.",
        off=0.0,
    )
    waits_per_one_out_of_turn: float = constant(
        3.0,
        "ratio",
        1.0,
        100.0,
        "One of so many seconds of waiting, at least, must be of that kind.",
        "Where most waiting is for workers that have no batch ready, more workers are needed and not more batches.",
        off=math.inf,
    )
    busy: float = constant(
        0.93,
        "share",
        0.5,
        1.0,
        "Workers that are at work for more than this share of the time make no more, however great the prefetch.",
        "Workers that never lack a ticket are at work for all but the moments between two of them.",
        off=math.inf,
    )
    full: float = constant(
        0.75,
        "share",
        0.3,
        1.0,
        "A queue of which so much is ready was full, and one of which so much is in flight lacks tickets.",
        "Some batches of a full queue are always being handed out, or under way.",
        off=math.inf,
    )
    short: float = constant(
        2.0,
        "batches",
        1.0,
        8.0,
        "A queue of no more than so many for each worker may leave one without a ticket.",
        "One is being made and one may be on its way; of a longer queue each worker has its next.",
        off=0.0,
    )
    empty: float = constant(
        0.1,
        "share",
        0.0,
        0.5,
        "A queue of which no more than this was ever ready is empty.",
        "A batch or two may be there by chance at the end of a window.",
        off=-1.0,
    )


@dataclass(frozen=True, kw_only=True)
class ExploreConstants(Constants):
    """Trials of what the model does not know. `AutotuneConfig.explore_s` says how often."""

    disappointing: float = constant(
        0.95,
        "ratio",
        0.5,
        1.0,
        "Settings disappoint if they bring less than this part of the rate that the model expects of them.",
        "Less is within what the model and the windows stray by.",
        off=0.0,
    )
    errors: float = constant(
        2.0,
        "standard errors",
        0.0,
        5.0,
        "By so much the rate may be higher than it was measured.",
        "Chance alone is further away in one of forty cases only.",
        off=0.0,
    )
    hopeful: float = constant(
        0.9,
        "ratio",
        0.0,
        1.0,
        "A trial must be expected to cost no more than down to this part of the rate.",
        "Two windows at 90 % cost a percent of the time between trials.",
        off=0.0,
    )
    steps: int = constant(
        4,
        "workers",
        1,
        64,
        "One worker more for so many that there are is tried.",
        "A smaller step does not show in windows of a second.",
        off=1_000_000_000,
    )


COMMON = CommonConstants()
IN_PROCESS = InProcessConstants()
PREFETCH = PrefetchConstants()
EXPLORE = ExploreConstants()
