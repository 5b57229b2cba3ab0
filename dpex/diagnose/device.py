"""The GPU's side of a run: batches that are made and not on the device yet, idleness that is not the loader's. Pure.

Copies and ``device_transform`` run beside the training steps, on a stream of their own, one after the other. Per batch
they take ``c + t`` seconds of the device, and the rest of the loop takes ``o``. Where ``c + t`` is more than ``o``,
they are what training goes by, and it waits for ``c + t - o``; with cheaper copies that is less. Where they take less,
what is waited comes of their beginning late, and is taken to shrink as they do.
"""

from __future__ import annotations

from dataclasses import dataclass

from dpex.diagnose.facts import Facts
from dpex.measure.readable import duration, percent

COPIES, TRANSFORM = "copies to the device", "device_transform"
"""What training waits for; where the verdict puts it."""
MATTERS = 0.05
"""From this share of the time on a wait for either is worth a remedy, as other waits are."""
IDLE = 0.2
"""From this share of the time on a GPU that idles while batches are ready is worth a word: short kernels leave gaps."""
HELD_BACK = 0.1
"""From this share of the time on clocks that are held back are worth a word."""
NARROW = 0.25
"""uint8 instead of float32."""
HALF = 0.5


@dataclass(frozen=True, kw_only=True)
class Cheaper:
    """What cheaper copies, or a cheaper transform, would bring: the share of the time waited, and times the rate."""

    wait: float
    gain: float


def waited_for(facts: Facts) -> str:
    """What of the two the training stream waits for; "" where it hardly waits."""
    if facts.copies_ratio < MATTERS:
        return ""
    return TRANSFORM if (facts.feed_transform_s or 0.0) > (facts.feed_copy_s or 0.0) else COPIES


def cheaper(facts: Facts, *, copies: float = 1.0, transform: float = 1.0) -> Cheaper:
    """With copies and transforms at these parts of their cost; see the module."""
    batches, wait_s = max(1, facts.batches), facts.feed_wait_s or 0.0
    before = (facts.feed_copy_s or 0.0) + (facts.feed_transform_s or 0.0)
    after = copies * (facts.feed_copy_s or 0.0) + transform * (facts.feed_transform_s or 0.0)
    other_s = max(1e-9, facts.wall_s - wait_s)
    if before > other_s:
        left_s = min(wait_s, max(0.0, after - other_s))
    else:
        left_s = wait_s * after / max(1e-9 * batches, before)
    return Cheaper(wait=left_s / (other_s + left_s), gain=(other_s + wait_s) / (other_s + left_s))


def remedy(facts: Facts) -> str:
    """What to do about what is waited for, and what that would bring; "" where there is nothing to do."""
    place = waited_for(facts)
    if place == TRANSFORM:
        brings = _brings(facts, cheaper(facts, transform=HALF))
        return (
            f"device_transform is what training waits for: make it cheaper, or leave a part of it to workers. {brings}"
        )
    if place == COPIES:
        brings = _brings(facts, cheaper(facts, copies=NARROW))
        return (
            "Copies are what training waits for: uint8 until the device, and floats by device_transform, are a quarter "
            f"of float32. {brings}"
        )
    return ""


def _brings(facts: Facts, after: Cheaper) -> str:
    what = "At half its cost" if waited_for(facts) == TRANSFORM else "With that"
    rate = f", and training would be {after.gain:.2g} times as fast" if after.gain >= 1.05 else ""
    now = percent(facts.copies_ratio)
    return f"{what} the training stream would wait for about {percent(after.wait)} of the time instead of {now}{rate}."


def late_batches(facts: Facts) -> str:
    """The verdict where the training stream waits for copies or transforms, in one sentence."""
    place, batches = waited_for(facts), max(1, facts.batches)
    seconds = facts.feed_transform_s if place == TRANSFORM else facts.feed_copy_s
    what = "device_transform takes" if place == TRANSFORM else "copying one takes"
    each = f"{what} {duration((seconds or 0.0) / batches)}"
    return (
        f"The training stream waits for {percent(facts.copies_ratio)} of the time for batches that are made and not "
        f"ready on the device: {each}. More workers change nothing."
    )


def not_the_loader(facts: Facts) -> str:
    """That the GPU idles while batches are ready, and that its clocks are held back, where NVML says so; else ""."""
    use = facts.gpu_use
    if use is None or use.supplied_busy_ratio is None:
        return ""
    told = ""
    if use.supplied_idle_ratio >= IDLE:
        busy = percent(use.supplied_busy_ratio)
        told = (
            f" While batches are ready the GPU runs kernels for {busy} of the time by NVML: what it waits for is not "
            "the loader."
        )
    slowed = [f"{name} ({percent(share)} of the time)" for name, share in use.held_back() if share >= HELD_BACK]
    return told + (f" The GPU's clocks are held back by {' and '.join(slowed)}." if slowed else "")
