"""Constants of planning: which settings are compared, and by what. PURE."""

from __future__ import annotations

from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class LimitsConstants(Constants):
    """What is worth a look at all."""

    beside: float = constant(
        2.0,
        "ratio",
        0.0,
        10.0,
        "Where batches mostly wait, so many times as many workers more than fill the CPUs if no two wait at once.",
        "Waits fall together by chance, and where slow batches come in a row.",
        off=0.0,
    )
    most_prefetch: int = constant(
        4096,
        "batches",
        64,
        1_000_000,
        "The greatest prefetch of all.",
        "Sixty-four workers with sixty-four batches each: beyond all that is compared.",
    )


@dataclass(frozen=True, kw_only=True)
class PlannerConstants(Constants):
    """The cheapest of the settings that are as fast as any."""

    as_fast: float = constant(
        0.98,
        "ratio",
        0.9,
        1.0,
        "A rate of this part of the best one counts as equal to it.",
        "Windows cannot tell them apart.",
        off=1.0,
    )
    near: float = constant(
        0.97,
        "ratio",
        0.5,
        1.0,
        "Numbers of workers with this part of the best rate, prefetch apart, are looked at more closely.",
        "What prefetch does may change their order by a percent.",
        off=1.0,
    )
    cheaper_tried: int = constant(
        4,
        "settings",
        1,
        64,
        "So many cheaper numbers of workers are played through.",
        "Each takes milliseconds, and those next to the plan are the likeliest.",
    )
    remote_cost: float = constant(
        1.05,
        "ratio",
        1.0,
        10.0,
        "A remote worker costs so many local ones.",
        "It uses the network; where both serve as well the local one is taken.",
        off=1.0,
    )
    most_per_worker: int = constant(
        16,
        "batches",
        2,
        64,
        "The greatest prefetch for each worker that is compared.",
        "It bridges all but rare batches, and more costs memory for all of them.",
    )
    safe_per_worker: int = constant(
        8,
        "batches",
        2,
        64,
        "The prefetch for each worker while the spread of times is not known.",
        "The longest of a spread are seen last, and batches in flight are cheap.",
        off=2,
    )
    spread_known: int = constant(
        32,
        "batches",
        4,
        1000,
        "So many batches show the spread.",
        "One batch in thirty that is slow shows with them; rarer ones cost little.",
        off=0,
    )
    safe: int = constant(
        2,
        "ratio",
        1,
        16,
        "Of uneven batches so many times as many are in flight as those seen ask for.",
        "Slower ones will come.",
        off=1,
    )
    hardly_uneven: float = constant(
        0.1,
        "ratio",
        0.0,
        1.0,
        "Batches that vary by less are alike, however few of them were seen.",
        "Clocks and CPUs alone make times vary by some percent.",
        off=0.0,
    )
    even: float = constant(
        0.2,
        "ratio",
        0.0,
        1.0,
        "Where batches and steps vary by less, only a small prefetch is compared.",
        "Four batches for each worker bridge any queue of such batches.",
        off=0.0,
    )
    worker_bytes: float = constant(
        64e6,
        "bytes",
        1e6,
        1e10,
        "The memory of a worker while it is unknown; batches in flight are cheap as long as they take no more.",
        "It is what one more worker process takes.",
    )
    short: float = constant(
        0.2,
        "share",
        0.0,
        1.0,
        "Where less than this part of the CPUs is idle, what looks like waiting may be queueing for a CPU.",
        "Where the kernel does not tell who queues, CPUs that are nearly all in use are the only sign.",
        off=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class OutlookConstants(Constants):
    """What is thought out anew, and what is believed of it."""

    alike: float = constant(
        0.05,
        "ratio",
        0.0,
        0.5,
        "As long as no number changes by more than this part, what was thought out holds.",
        "Thinking takes milliseconds of a thread of the training process; half a gain is no reason to.",
        off=0.0,
    )
    least_windows: int = constant(
        2,
        "windows",
        1,
        20,
        "From so many windows on no rate is believed that would take more than the time now lost.",
        "The first window may hold batches that were ready before it.",
        off=1_000_000_000,
    )
    least_share: float = constant(
        0.02,
        "share",
        0.0,
        0.5,
        "The share of the time that steps are taken to have at least, for that rate.",
        "A training loop that always waits tells nothing of its steps; fifty times the rate is no limit.",
    )


LIMITS = LimitsConstants()
PLANNER = PlannerConstants()
OUTLOOK = OutlookConstants()
