"""The causes of the consumer's waits, by rules that give every second one cause; apart as `consumer_time` counts. PURE.

1. The first call of a pass, and any wait while no worker runs: `STARTUP`.
2. Blocked while later batches are ready and the next one in turn is not: `STRAGGLER`.
3. Blocked until a batch is in page-locked memory: `H2D`.
4. Blocked otherwise: split among the stages of the awaited batch, in proportion to their times. While workers are never
   idle, batches come at ``workers / service time`` (the utilisation law: Denning and Buzen, "The Operational Analysis
   of Queueing Network Models", 1978). So each stage costs the consumer its share of the service time, whichever stage
   overlapped the wait.
5. A batch made in the training process: its stages, as long as they took.
6. Busy in ``next()`` drawing from the sampler: `SAMPLER`. Busy handing out work, and taking in what workers report:
   `DISPATCH`.
7. All other seconds, such as those of errors: `UNKNOWN`.

Getting the samples, ``dataset[i]``, is one stage to dpex. The CPU seconds in it count as `TRANSFORM`, the rest as
`READ`: reading waits, computing does not. So a dataset that decodes as it reads shows both, and a machine with more
workers than processors shows some of its transform as read.
"""

from __future__ import annotations

from dpex.measure.batch_times import BatchTimes, StageSums

CAUSES = (
    *("read", "transform", "collate", "encode", "transit", "h2d", "straggler", "startup"),
    *("sampler", "dispatch", "unknown"),
)
"""Names, in the order of the numbers below."""
READ, TRANSFORM, COLLATE, ENCODE, TRANSIT, H2D, STRAGGLER, STARTUP, SAMPLER, DISPATCH, UNKNOWN = range(len(CAUSES))
STAGE_CAUSES = CAUSES[: TRANSIT + 1]
"""Causes that are stages of a batch."""
NONE_YET = -1
"""The cause of a wait is known when the awaited batch is there."""


def by_stage(times: BatchTimes | StageSums) -> tuple[float, float, float, float, float]:
    """Return the seconds by the causes of `STAGE_CAUSES`."""
    transform_s = min(times.load_s, times.load_cpu_s)
    return times.load_s - transform_s, transform_s, times.collate_s, times.encode_s, times.transit_s


def split(waited_s: float, times: BatchTimes | None) -> list[tuple[int, float]]:
    """Split a wait for a batch by cause; the parts add up to it. Without times of the batch it is `UNKNOWN`."""
    stages = by_stage(times) if times is not None else ()
    total = sum(stages)
    if total <= 0.0:
        return [(UNKNOWN, waited_s)]
    return [(cause, waited_s * seconds / total) for cause, seconds in enumerate(stages) if seconds > 0.0]
