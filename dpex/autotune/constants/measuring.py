"""Constants of measuring: how windows become an estimate of the work, and that a rate. PURE."""

from __future__ import annotations

import math
from dataclasses import dataclass

from dpex.autotune.constants import Constants, constant


@dataclass(frozen=True, kw_only=True)
class EstimatorConstants(Constants):
    """What a batch and a step cost."""

    known_from: int = constant(
        4,
        "batches",
        1,
        100,
        "Before so many batches nothing is known of the work.",
        "The first of them started workers and caches.",
        off=1,
    )
    saturated: float = constant(
        0.8,
        "share",
        0.5,
        1.0,
        "CPUs of which more than this share is in use may have somebody queueing for them.",
        "Threads come in bursts, and queue before all CPUs are in use.",
        off=math.inf,
    )
    spread_kept: int = constant(
        512,
        "batches",
        32,
        10_000,
        "Service times that are remembered for the spread.",
        "One batch in a hundred that is slow is among them five times.",
    )
    spread_known: int = constant(
        32,
        "batches",
        4,
        1000,
        "From so many on the spread is believed.",
        "The spread of 32 times is known to an eighth.",
        off=1,
    )
    most_spread: float = constant(
        1000.0,
        "ratio",
        10.0,
        1e6,
        "How many times as long as usual a batch is taken to take at most.",
        "What is beyond that would hide all others from the mean.",
        off=math.inf,
    )
    crowded: float = constant(
        1.1,
        "ratio",
        1.0,
        3.0,
        "Workers are in each other's way if a batch takes so many times the least CPU time that it took.",
        "Less is within what clocks and CPU frequencies stray by.",
        off=math.inf,
    )
    crowded_error: float = constant(
        0.025,
        "ratio",
        0.001,
        0.5,
        "A window says what the least CPU time is if its mean is known to this part.",
        "Else the least of many windows would be one that was lucky.",
        off=math.inf,
    )
    error_before: float = constant(
        0.04,
        "ratio",
        0.001,
        0.5,
        "A number of workers says so, when it ends, if its mean is known to this part.",
        "It is the gain that a change must promise.",
        off=math.inf,
    )
    others_kept: int = constant(
        4,
        "windows",
        1,
        100,
        "Windows over which the CPUs that other programs take are averaged.",
        "Other programs come and go; a single look would follow each of them.",
        off=1,
    )
    others_stale_s: float = constant(
        1.0,
        "seconds",
        0.0,
        60.0,
        "For so long after workers have started, the same figure of other programs still holds what started them.",
        "Other programs are looked at twice a second.",
        off=0.0,
    )
    matters: float = constant(
        0.2,
        "ratio",
        0.0,
        1.0,
        "A change of a part of the work is none if that part is less than this of the largest part.",
        "Small parts are measured badly, and their changes change nothing.",
        off=0.0,
    )
    step_matters: float = constant(
        0.05,
        "share",
        0.0,
        1.0,
        "Nor is one of the step, if that takes less than this share of the time.",
        "A training loop that always waits could step at any pace.",
        off=0.0,
    )
    uncertain_queueing: float = constant(
        0.25,
        "ratio",
        0.0,
        1.0,
        "By this part of it, waiting of workers may come out below nothing.",
        "Queueing for a CPU is known no better; cut off at nothing, its errors would add up to waiting.",
        off=0.0,
    )
    several_threads: float = constant(
        1.2,
        "ratio",
        1.0,
        3.0,
        "CPU time of so many times the wall time shows that a batch keeps several CPUs busy.",
        "Less may be the clocks' error.",
        off=math.inf,
    )
    least_dearer: float = constant(
        0.02,
        "ratio",
        0.0,
        0.5,
        "Errors of the costs below this are not reckoned with before capacity is given back.",
        "`AutotuneConfig.headroom` covers them.",
        off=math.inf,
    )
    most_dearer: float = constant(
        0.5,
        "ratio",
        0.0,
        5.0,
        "And no larger error than this.",
        "It would say that nothing is known yet, and is no figure to plan by.",
        off=math.inf,
    )
    many_more: float = constant(
        1.5,
        "ratio",
        1.0,
        5.0,
        "With so many times the workers, or so few, waiting may be another: it may be queueing for a storage.",
        "A storage that is full makes waiting as many times as long.",
        off=math.inf,
    )
    hardly_known: float = constant(
        0.1,
        "windows",
        0.0,
        10.0,
        "What was known of waiting counts as so many windows then.",
        "Else the difference would be taken for a change of the work.",
    )
    resized_windows: int = constant(
        2,
        "windows",
        0,
        20,
        "Windows after a change of the number of workers whose batches say nothing of the spread.",
        "They are measured by a level that is not known yet.",
        off=0,
    )
    mixed_windows: int = constant(
        16,
        "windows",
        1,
        100,
        "Windows with batches after which none can still be of the workers that there were before.",
        "Some ten seconds: the number may have been told wrong, and would keep everything else from being learnt.",
    )
    moved_windows: int = constant(
        2,
        "windows",
        0,
        10,
        "Windows that were of the new level already when a change of the work is noticed.",
        "Two windows far off are the soonest that a change is told by.",
        off=0,
    )
    here_s: float = constant(
        8e-6,
        "seconds",
        0.0,
        0.001,
        "What a batch costs more in the training process than a worker says.",
        "Random states are set and put back.",
        off=0.0,
    )


@dataclass(frozen=True, kw_only=True)
class LinkConstants(Constants):
    """The way to remote workers and back."""

    windows: int = constant(
        3,
        "windows",
        1,
        20,
        "Windows over which the batches under way are averaged.",
        "They are counted at the end of a window, where chance moves one or two.",
        off=1,
    )
    idle: float = constant(
        0.85,
        "share",
        0.0,
        1.0,
        "Remote workers that are busy for less than this share of the time have time to spare.",
        "What is drawn beyond that queues on the way, as nobody has to wait for a worker.",
        off=0.0,
    )
    first_services: float = constant(
        2.0,
        "ratio",
        0.0,
        20.0,
        "With other workers than before, nothing queues on the way for so many times as long as one takes for a batch.",
        "A batch counts as work when it comes: what new workers have just begun would count as queueing.",
        off=0.0,
    )
    longest_way_s: float = constant(
        0.2,
        "seconds",
        0.001,
        10.0,
        "A way that takes longer than this is no distance: batches queue on it.",
        "Around the earth and back takes 0.2 s.",
        off=math.inf,
    )
    presumed_bytes_per_s: float = constant(
        1.25e9,
        "bytes/s",
        1e7,
        1e11,
        "What the network is taken to carry until more was seen.",
        "10 Gbit/s is common; without it large batches are asked of workers from which no network brings them back.",
        off=math.inf,
    )
    more: float = constant(
        2.0,
        "ratio",
        1.0,
        10.0,
        "It is taken to carry so many times what was seen to come.",
        "Nobody has seen what it cannot carry; a doubling is tried at a time.",
        off=math.inf,
    )
    full: float = constant(
        0.9,
        "share",
        0.5,
        1.0,
        "The way carries what it can if machines send for this share of the time.",
        "The rest is the time in which the trainer asks for more and workers begin with it.",
        off=math.inf,
    )
    roomy: float = constant(
        0.75,
        "share",
        0.0,
        1.0,
        "It carries more than was seen if they send for less than this share.",
        "Between the two what is known stays: the share moves by chance from window to window.",
        off=0.0,
    )
    measured_s: float = constant(
        0.5,
        "seconds",
        0.05,
        10.0,
        "Both are said of so many seconds at least.",
        "Machines tell four times a second.",
        off=0.0,
    )
    stuck: float = constant(
        0.5,
        "share",
        0.0,
        1.0,
        "Nothing comes at all if later batches are ready for this share of a window, and local workers idle for it.",
        "A window in which something came for half of the time is no standstill.",
        off=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class ModelConstants(Constants):
    """Service times played through an ordered window."""

    replayed_if_even: int = constant(
        240,
        "batches",
        50,
        10_000,
        "Batches that are played where service times do not vary.",
        "Only the second half counts, once the window of batches in flight is full.",
    )
    replayed_if_uneven: int = constant(
        1200,
        "batches",
        100,
        100_000,
        "Batches that are played where they vary by their mean.",
        "The half that counts has a mean that is known to 4 %, the gain that a change must promise.",
    )
    even: float = constant(
        0.1,
        "ratio",
        0.0,
        1.0,
        "Times that vary by less are played as if they did not.",
        "It changes rates by less than a percent.",
        off=0.0,
    )
    correlated: float = constant(
        2.0,
        "batches",
        0.0,
        100.0,
        "Service times that stay alike over fewer batches are played as if they were independent.",
        "It does not show in rates.",
        off=math.inf,
    )


@dataclass(frozen=True, kw_only=True)
class GpuConstants(Constants):
    """What CUDA events and NVML say of what the GPU loses."""

    starved: float = constant(
        0.05,
        "share",
        0.0,
        0.5,
        "From this share of lost time on the training loop's own step is seen as it is.",
        "A loop that runs ahead of its GPU is held up by a full launch queue as long as the GPU has enough to do.",
    )
    look_s: float = constant(
        2.0,
        "seconds",
        0.0,
        10.0,
        "For so long after a change NVML tells of the time before it, and nothing is decided by it.",
        "It is asked once a second, and answers for up to a second.",
        off=0.0,
    )
    busy: float = constant(
        0.95,
        "share",
        0.5,
        1.0,
        "A GPU that runs kernels for this share of the time gets no more workers, whatever the training loop waits.",
        "A GPU that is the limit shows 0.97 to 1; gaps between launches are a few percent.",
        off=math.inf,
    )
    idle: float = constant(
        0.7,
        "share",
        0.0,
        0.95,
        "A GPU that runs kernels for less than this share of the time, and lacks no data, waits for something else.",
        "Short kernels leave gaps of a tenth or two, which are nobody's fault.",
        off=0.0,
    )
    hardly_lost: float = constant(
        0.05,
        "share",
        0.0,
        0.5,
        "A GPU that waits for data for less than this share of the time lacks none.",
        "As for the diagnosis: below it an input pipeline is not the limit.",
        off=0.0,
    )


ESTIMATOR = EstimatorConstants()
GPU = GpuConstants()
LINK = LinkConstants()
MODEL = ModelConstants()
