"""The causes of a wait and all other verdicts, each once, with every text about it. Pure.

`dpex.diagnose.attribution` has the rule that gives a cause its seconds. A new cause takes a record here and a rule
there. The verdict, the report, its page, the live page and ``docs/how-to/gpu-starves.md`` read this table.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of a wait, or another verdict.

    Attributes:
        key: The value of `Verdict.cause`.
        title: The verdict in words.
        part: The name of its seconds.
        explanation: Ends "The training loop waits, because ...".
        evidence: The measurement.
        advice: The remedy.
        colour: The CSS colour.
    """

    key: str
    title: str
    part: str = ""
    explanation: str = ""
    evidence: str = ""
    advice: str = ""
    colour: str = "#b0b4ba"


STARTUP = Cause(
    key="startup",
    title="start-up",
    part="starting",
    explanation="the first batch of each epoch takes long",
    evidence="the first batch of each epoch, and waits while no worker ran",
    advice="Keep the workers between epochs (`persistent_workers=True`).",
    colour="#a7953a",
)
STRAGGLER = Cause(
    key="straggler",
    title="straggler-bound",
    part="single slow batches",
    explanation="single slow batches delay finished later batches, while workers are idle",
    evidence="waits while later batches were ready, as far as other workers were idle",
    advice="Use a larger `prefetch_factor`, and look at the slowest samples.",
    colour="#3f7fb5",
)
MEMORY = Cause(
    key="memory",
    title="memory-bound",
    part="too few batches in flight",
    explanation="too few batches may be in flight, so that workers idle",
    evidence="waits while workers were idle because no more batches may be in flight",
    advice="Allow more batches in flight (`memory_budget`, `prefetch_factor`), or make them smaller.",
    colour="#b5588f",
)
CROWDING = Cause(
    key="crowding",
    title="too few CPUs for the training loop",
    part="next() waiting for a CPU",
    explanation="other programs or workers use the CPUs that the training loop itself needs",
    evidence="the training thread's run queue inside next(), from the kernel's schedstat",
    advice="Use fewer workers, or run fewer other programs.",
    colour="#7a4a3a",
)
DISPATCH = Cause(
    key="dispatch",
    title="dispatch-bound",
    part="dispatching work and receiving batches",
    explanation="dispatching work to the workers and receiving what they report keeps the training loop itself busy",
    evidence="timed around messages in next(); of tiny batches also waits while workers were idle",
    advice="Use larger batches, workers on this machine, or `num_workers=0` where batches are tiny.",
    colour="#7d8794",
)
SAMPLER = Cause(
    key="sampler",
    title="sampler-bound",
    part="drawing from the sampler",
    explanation="drawing from the sampler takes long, and the training loop does it in next()",
    evidence="timed around drawing from the sampler in next()",
    advice="Use a faster sampler, which draws the indices of an epoch at once.",
    colour="#5d8f5a",
)
TRANSFER = Cause(
    key="transfer",
    title="transfer-bound",
    part="moving batches",
    explanation="moving batches takes long",
    evidence="waits, by serialising and transit of the batch waited for; pinning; taking batches in",
    advice="Use smaller types (`uint8` until the device, with a device transform), and tensors instead of objects.",
    colour="#8a63b8",
)
CPU = Cause(
    key="cpu",
    title="CPU-bound preprocessing",
    part="computing batches",
    explanation="making batches takes CPU time",
    evidence="waits, by the CPU time and run queues of the stages of the batch waited for",
    advice="Make the transforms cheaper, use more workers while CPUs are idle, or the CPUs of a cluster.",
    colour="#c9574a",
)
STORAGE = Cause(
    key="storage",
    title="storage-bound reading",
    part="reading data",
    explanation="making batches waits for data",
    evidence="waits, by wall less CPU time and run queues of the stages of the batch waited for",
    advice="Use more workers, or a cache.",
    colour="#d08a2e",
)
UNKNOWN = Cause(
    key="unknown",
    title="cause unknown",
    part="causes that were not measured",
    explanation="something in next() takes long that is neither waiting for a batch, nor making one, drawing or "
    "dispatching",
    evidence="next(), less all that has a cause",
    advice="Profile `next()` (py-spy, cProfile).",
)
STEP = Cause(
    key="consumer",
    title="training-bound",
    part="the training step",
    explanation="loading does not limit the run",
    advice="Look at the training step.",
    colour="#4a8f5a",
)
HELD = Cause(key="held", title=CROWDING.title, part="the step waiting for a CPU", colour="#9a5a44")
MIXED = Cause(
    key="mixed",
    title="mixed",
    explanation="no single cause stands out",
    advice="Follow the first advice of the report.",
)
TOO_EARLY = Cause(
    key="too-early",
    title="too early to say",
    explanation="too few batches were measured",
    advice="Let training run for longer, and ask again.",
)

WAITS = (STARTUP, STRAGGLER, MEMORY, CROWDING, DISPATCH, SAMPLER, TRANSFER, CPU, STORAGE, UNKNOWN)
"""The causes of a wait."""
CAUSES = {one.key: one for one in (STEP, *WAITS, MIXED, TOO_EARLY)}
"""All verdicts by key."""
