"""The GPU's side of a run: batches that are not on the device in time, idleness that is not the loader's. Pure.

Copies and the device transform run beside the training steps, on a stream of their own, one after the other. Per batch
they take ``c + t`` seconds of the device, and the rest of the loop takes ``o``. Where ``c + t`` is more than ``o``,
training waits for ``c + t - o``, and cheaper ones shorten that wait by what they save.
"""

from __future__ import annotations

from dpex.diagnose.facts import Facts
from dpex.measure.readable import duration, percent

COPIES, TRANSFORM = "copies to the device", "device transform"
"""The two that training can wait for; the place in the verdict."""
MATTERS = 0.05
"""Share of the time from which a wait for either is worth a remedy, as other waits are."""
IDLE = 0.2
"""Share of the time from which a GPU that idles while batches are ready is mentioned: short kernels leave gaps."""
HELD_BACK = 0.1
"""Share of the time from which clocks that are held back are mentioned."""


def waited_for(facts: Facts) -> str:
    """Return which of the two the training stream waits for; "" where it hardly waits."""
    if facts.copies_ratio < MATTERS:
        return ""
    return TRANSFORM if (facts.feed_transform_s or 0.0) > (facts.feed_copy_s or 0.0) else COPIES


def late_batches(facts: Facts) -> str:
    """Return the verdict where the training stream waits for copies or transforms, in one sentence."""
    place, batches = waited_for(facts), max(1, facts.batches)
    seconds = facts.feed_transform_s if place == TRANSFORM else facts.feed_copy_s
    what = "the device transform takes" if place == TRANSFORM else "copying one takes"
    each = f"{what} {duration((seconds or 0.0) / batches)}"
    return (
        f"The training stream waits for {percent(facts.copies_ratio)} of the time for batches that are made and not "
        f"ready on the device: {each}. More workers change nothing."
    )


def not_the_loader(facts: Facts) -> str:
    """Return that the GPU idles while batches are ready, and that its clocks are held back, where NVML says so."""
    use = facts.gpu_use
    if use is None or use.supplied_busy_ratio is None:
        return ""
    sentences = ""
    if use.supplied_idle_ratio >= IDLE:
        busy = percent(use.supplied_busy_ratio)
        sentences = (
            f" While batches are ready the GPU runs kernels for {busy} of the time by NVML: what it waits for is not "
            "the loader."
        )
    slowed = [f"{name} ({percent(share)} of the time)" for name, share in use.held_back() if share >= HELD_BACK]
    return sentences + (f" The GPU's clocks are held back by {' and '.join(slowed)}." if slowed else "")
