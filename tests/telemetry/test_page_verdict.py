"""The sentence says what is in the numbers, and nothing before there are enough of them."""

from __future__ import annotations

import pytest

from dpex.causes import CAUSES
from dpex.telemetry.verdict import WORDS, Spending, verdict


def spent(wait_s: float, *, batches: int = 100, gpu_stall_s: float | None = None, **causes: float) -> Spending:
    return Spending(batches=batches, wait_s=wait_s, work_s=100.0 - wait_s, causes=causes, gpu_stall_s=gpu_stall_s)


def test_every_cause_has_words() -> None:
    assert tuple(WORDS) == CAUSES


@pytest.mark.parametrize("batches", [0, 49])
def test_too_early(batches: int) -> None:
    said = verdict(spent(90.0, batches=batches, read=90.0))
    assert (said.level, said.text) == ("early", f"Too early to say: {batches} of 50 batches so far.")


def test_no_time_spent_is_too_early_as_well() -> None:
    assert verdict(Spending(batches=80)).level == "early"


@pytest.mark.parametrize(
    ("wait_s", "level"), [(0.0, "good"), (4.9, "good"), (5.0, "fair"), (19.9, "fair"), (20.0, "bad"), (100.0, "bad")]
)
def test_levels(wait_s: float, level: str) -> None:
    assert verdict(spent(wait_s, read=wait_s)).level == level


def test_one_cause() -> None:
    said = verdict(spent(38.0, transform=30.0, read=7.0, h2d=1.0)).text
    assert said == f"The training loop waits 38 % of the time, mostly for {WORDS['transform']}."


def test_two_causes() -> None:
    said = verdict(spent(40.0, transform=18.0, read=12.0, straggler=10.0)).text
    assert said == (
        f"The training loop waits 40 % of the time, for {WORDS['transform']} (45 % of it) "
        f"and {WORDS['read']} (30 % of it)."
    )


def test_many_causes() -> None:
    assert "waits 54 % of the time, for many causes" in verdict(spent(54.0, **dict.fromkeys(CAUSES, 6.0))).text


def test_the_gpu() -> None:
    assert verdict(spent(2.0, read=2.0, gpu_stall_s=0.4)).text == (
        "Loading keeps up: the training loop waits 2 % of the time; the GPU idles less than 1 % because of it."
    )
    assert verdict(spent(30.0, read=30.0, gpu_stall_s=12.0)).text.endswith("; the GPU idles 12 % because of it.")
