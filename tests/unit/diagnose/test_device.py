"""The GPU's side of a diagnosis: late copies and transforms, and a GPU that idles although batches are ready."""

from __future__ import annotations

from typing import Any

import pytest

from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.diagnose.facts import Facts, PoolFacts
from dpex.measure.gpu_use import GpuUse
from dpex.measure.wait_causes import CAUSES

N = 400
POOL = PoolFacts(tickets=N, workers=4, load_s=4.0, load_cpu_s=4.0, queued_s=0.0, services_s=(0.01,) * 64)


def facts(**changes: Any) -> Facts:
    """A run of 10 s whose loop hardly waits."""
    values: dict[str, Any] = {
        "batches": N,
        "samples": 8 * N,
        "passes": 1,
        "causes": dict.fromkeys(CAUSES, 0.0) | {"read": 0.1},
        "work_s": 9.9,
        "pools": {"local": POOL},
        "cpus": 8.0,
        "prefetch": 8,
        "trainer_queued_s": 0.0,
        "others": 0.0,
        "gpu_stall_s": 0.1,
    }
    return Facts(**values | changes)


def told(found: Diagnosis) -> str:
    return " ".join(found.full.split())


COPYING: dict[str, Any] = {"feed_copy_s": 9.8, "feed_transform_s": 0.0, "feed_wait_s": 6.0}
TRANSFORMING: dict[str, Any] = {"feed_copy_s": 1.0, "feed_transform_s": 8.8, "feed_wait_s": 6.0}


def test_a_loop_that_goes_by_its_copies_is_not_said_to_train_at_its_limit() -> None:
    found = diagnose(facts(**COPYING))
    assert (found.verdict.cause, found.verdict.where) == ("transfer", "copies to the device")
    assert found.verdict.is_sure
    assert "waits for 60 % of the time for batches that are made and not ready on the device" in found.verdict.sentence
    assert "copying one takes 24.5 ms" in found.verdict.sentence
    assert "waiting for the device's batches 60 %" in told(found)
    assert found.recommendation is not None
    assert found.advice.startswith("a quarter of the bytes (uint8 until the device): ")
    assert found.recommendation.rate == pytest.approx(2.5 * 40, rel=0.03)


def test_a_transform_of_the_device_is_named() -> None:
    found = diagnose(facts(**TRANSFORMING))
    assert (found.verdict.cause, found.verdict.where) == ("transfer", "device transform")
    assert "the device transform takes 22 ms" in found.verdict.sentence
    assert found.recommendation is not None
    assert found.advice.startswith("the device transform at half its cost: ")
    assert found.recommendation.rate == pytest.approx(40 * 10 / 5.6, rel=0.03)


@pytest.mark.parametrize(
    "changes",
    [
        {"feed_copy_s": 9.8, "feed_transform_s": 0.0, "feed_wait_s": 0.4},
        {"feed_copy_s": None, "feed_transform_s": None, "feed_wait_s": None},
    ],
    ids=["copies in time", "no device"],
)
def test_without_late_copies_the_step_is_the_limit(changes: dict[str, Any]) -> None:
    found = diagnose(facts(**changes))
    assert found.verdict.cause == "consumer"


def test_workers_that_are_too_few_come_first() -> None:
    """Where more is lost to them than to copies."""
    causes = dict.fromkeys(CAUSES, 0.0) | {"read": 5.0}
    found = diagnose(facts(causes=causes, work_s=5.0, gpu_stall_s=5.0, **{**COPYING, "feed_wait_s": 1.0}))
    assert found.verdict.where == "the dataset"


# -- NVML --------------------------------------------------------------------------------------------------------------


def use(*windows: tuple[float, bool], held_back: tuple[str, ...] = ()) -> GpuUse:
    found = GpuUse()
    for busy, is_supplied in windows:
        found = found.plus(GpuUse.of_window(1.0, busy, is_supplied=is_supplied, held_back=held_back))
    return found


def test_what_nvml_said_is_summed() -> None:
    found = use((0.2, True), (1.0, False))
    assert (found.busy_ratio, found.supplied_busy_ratio, found.supplied_idle_ratio) == (0.6, 0.2, 0.4)
    assert (GpuUse().busy_ratio, GpuUse().supplied_busy_ratio, GpuUse().held_back()) == (None, None, [])


def test_a_gpu_that_idles_while_batches_are_ready_does_not_wait_for_the_loader() -> None:
    found = diagnose(facts(gpu_use=use((0.4, True), (0.4, True))))
    assert found.verdict.cause == "consumer"
    assert "While batches are ready the GPU runs kernels for 40 % of the time by NVML" in found.verdict.sentence
    assert "what it waits for is not the loader" in found.verdict.sentence
    assert "GPU runs kernels 40 % NVML" in told(found)
    assert found.to_dict()["facts"]["gpu_use"]["supplied_s"] == 2.0


def test_clocks_that_are_held_back_are_told() -> None:
    found = diagnose(facts(gpu_use=use((0.97, True), (0.97, True), held_back=("the power limit",))))
    assert found.verdict.sentence.endswith("The GPU's clocks are held back by the power limit (100 % of the time).")
    assert "While batches are ready" not in found.verdict.sentence


def test_a_busy_gpu_needs_no_word() -> None:
    assert "NVML" not in diagnose(facts(gpu_use=use((0.97, True)))).verdict.sentence
