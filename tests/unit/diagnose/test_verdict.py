"""Each verdict from measurements made by hand, and how sure it is."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpex.diagnose.diagnosis import diagnose, facts_of
from dpex.diagnose.facts import Facts, Subject
from dpex.diagnose.verdict import SURE, Verdict
from dpex.measure.causes import TIMED, losses
from dpex.measure.pool_reading import STAGES, PoolReading
from dpex.measure.reading import Reading

N = 400


def pool(*, queued_s: float | None = 0.0, **changes: Any) -> PoolReading:
    """Four workers that were busy for 10 s each; queued_s: None where the kernel does not tell."""
    busy_s = sum(changes.get(f"{stage}_s", 0.0) for stage in STAGES)
    known = {} if queued_s is None else {"queued_s": queued_s, "queue_known_s": busy_s}
    return PoolReading(**{"tickets": N, "running": 4, "services_s": (0.1,) * 64, **known, **changes})


READING = pool(load_s=40.0, load_cpu_s=0.4)
COMPUTING = pool(load_s=40.0, load_cpu_s=39.0)


def judge(measured: Facts) -> Verdict:
    return diagnose(measured).verdict


def facts(causes: dict[str, float], local: PoolReading | None = None, **changes: Any) -> Facts:
    """A run of 10 s, of which the consumer worked what it did not wait."""
    values: dict[str, Any] = {
        "batches": N,
        "samples": 8 * N,
        "passes": 1,
        "causes": dict.fromkeys(TIMED, 0.0) | causes,
        "work_s": 10.0 - sum(causes.values()),
        "pools": {"local": local or READING},
        "cpus": 8.0,
        "prefetch": 8,
        "batch_bytes": 1e6,
        "trainer_cpu_s": 1.0,
        "trainer_queued_s": 0.0,
        "others_over_s": 10.0,
    }
    values |= changes
    return Facts(**{"later_batches": values["batches"] - values["passes"]} | values)


HERE = PoolReading(tickets=N, load_s=6.0, load_cpu_s=5.9)
QUEUEING = pool(load_s=40.0, load_cpu_s=10.0, queued_s=29.0)
COLLATING = pool(load_s=4.0, load_cpu_s=4.0, collate_s=36.0, collate_cpu_s=35.0)
SENDING = pool(load_s=4.0, load_cpu_s=4.0, transit_s=36.0)
ENCODING = pool(load_s=4.0, load_cpu_s=4.0, encode_s=36.0, encode_cpu_s=35.0)
TINY = pool(load_s=0.1, load_cpu_s=0.1, collate_s=0.02, collate_cpu_s=0.02, encode_s=0.01)
NETWORK = {"network": 1e9}

PLANTED: dict[str, tuple[str, str, Facts]] = {
    "consumer": ("consumer", "", facts({"read": 0.2})),
    "reading": ("storage", "the dataset", facts({"read": 6.0, "transform": 0.1})),
    "computing": ("cpu", "the dataset", facts({"read": 0.1, "transform": 6.0}, COMPUTING)),
    "computing in this process": ("cpu", "the dataset", facts({"read": 0.1, "transform": 5.9}, pools={"inline": HERE})),
    "queueing for CPUs": ("cpu", "the dataset", facts({"read": 4.5, "transform": 1.5}, QUEUEING, cpus=2.0)),
    "collating": ("cpu", "the collate function", facts({"transform": 0.6, "collate": 5.4}, COLLATING)),
    "waiting while collating": (
        "storage",
        "the collate function",
        facts({"read": 0.1, "collate": 5.9}, replace(COLLATING, collate_cpu_s=0.4)),
    ),
    "network": ("transfer", "the network", facts({"transform": 0.6, "transit": 5.4}, SENDING, moved_bytes=NETWORK)),
    "machine to device": ("transfer", "host-to-device", facts({"transform": 0.3, "h2d": 5.0})),
    "large objects": ("transfer", "serialisation", facts({"transform": 0.6, "encode": 5.4}, ENCODING)),
    "stragglers": ("straggler", "", facts({"read": 0.5, "straggler": 5.0}, head_idle_s=3.75)),
    "a queue too short": ("memory", "prefetch", facts({"read": 6.0}, other_idle_s=4.5, prefetch=1)),
    "tiny batches": ("dispatch", "", facts({"transform": 4.0, "unknown": 1.0}, TINY, transfer_s=1.0)),
    "a slow sampler": ("sampler", "10 ms per batch", facts({"sampler": 4.0, "read": 0.5})),
    "messages": ("dispatch", "5 ms per batch", facts({"dispatch": 2.0, "unknown": 0.2, "read": 0.1})),
    "messages to a cluster": (
        "dispatch",
        "5 ms per batch, with workers on the cluster",
        facts({"dispatch": 2.0, "unknown": 0.2}, pools={"remote": READING}),
    ),
    "something else": ("unknown", "", facts({"unknown": 4.0, "read": 0.5})),
    "CPUs that others hold": ("crowding", "", facts({"unknown": 3.0, "read": 0.2}, loop_queued_s=2.9)),
    "start": ("startup", "", facts({"startup": 5.0, "read": 0.3})),
    "read and compute": ("mixed", "", facts({"read": 3.0, "transform": 2.6}, pool(load_s=40.0, load_cpu_s=19.0))),
    "compute and stragglers": ("mixed", "", facts({"transform": 3.0, "straggler": 3.0}, COMPUTING, head_idle_s=2.25)),
    "too few batches": ("too-early", "", facts({"read": 6.0}, batches=49)),
    "too few long batches": ("too-early", "", facts({"read": 9.0}, work_s=6.0, batches=19)),
    "too short": ("too-early", "", facts({"read": 0.6}, work_s=0.3)),
}


@pytest.mark.parametrize("name", PLANTED)
def test_what_is_planted_is_found(name: str) -> None:
    cause, where, measured = PLANTED[name]
    verdict = diagnose(measured).verdict
    assert verdict.cause == cause
    if where:
        assert verdict.where == where
    assert verdict.is_sure == (cause != "too-early")
    assert verdict.sentence.endswith(".")


def test_a_full_machine_is_reported_beside_any_other_cause() -> None:
    mixed = facts({"read": 5.0, "transform": 0.5}, replace(QUEUEING, queued_s=0.45 * QUEUEING.load_s), cpus=2.0)
    assert judge(mixed).cause == "mixed"
    assert "The machine is full: workers wait for a CPU." in judge(mixed).sentence
    here = facts({"read": 4.5, "transform": 1.5}, pools={"inline": QUEUEING}, cpus=2.0)
    assert "The machine is full: next() waits for a CPU." in judge(here).sentence


def test_a_little_of_this_and_that_is_not_the_limit() -> None:
    """94 % of the time in the step."""
    assert judge(facts({"unknown": 0.42, "read": 0.18}, pool(load_s=N * 0.0045, load_cpu_s=0.4))).cause == "consumer"


def test_several_small_losses_together_matter() -> None:
    verdict = judge(facts({"unknown": 0.45, "read": 0.45, "transform": 0.45}, pool(load_s=40.0, load_cpu_s=20.0)))
    assert verdict.cause == "mixed"


def test_only_tiny_batches_are_said_to_be_small() -> None:
    causes = {"transform": 1.0, "unknown": 4.0}
    assert judge(facts(causes, TINY)).cause == "dispatch"
    assert judge(facts(causes, COMPUTING)).cause == "unknown"


def test_dispatch_to_a_cluster_says_what_changes_it() -> None:
    told = diagnose(PLANTED["messages to a cluster"][2])
    assert "so small" not in told.verdict.sentence
    assert "larger" in {one.kind for one in told.predictions}
    assert "batches of four times the size" in told.advice
    assert "so small" in judge(facts({"transform": 1.0, "dispatch": 4.0}, TINY)).sentence


@pytest.mark.parametrize("cause", ["sampler", "dispatch", "unknown"])
def test_a_training_thread_queued_for_cpus_has_cause_crowding(cause: str) -> None:
    assert judge(facts({cause: 3.0, "read": 0.2}, loop_queued_s=2.9)).cause == "crowding"
    assert judge(facts({cause: 3.0, "read": 0.2}, loop_queued_s=0.2)).cause == cause


def test_forty_long_batches_are_enough() -> None:
    verdict = judge(facts({"transform": 12.0}, COMPUTING, work_s=3.0, batches=40))
    assert verdict.cause == "cpu"
    assert verdict.is_sure


def test_a_late_batch_of_one_asynchronous_worker_is_a_straggler() -> None:
    """The worker makes eight batches at the same time, of which seven wait behind the late one."""
    one = replace(READING, running=1)
    measured = facts({"read": 0.5, "straggler": 5.0}, one, head_idle_s=5.0 * 7 / 8, lanes=8, prefetch=16)
    found = diagnose(measured)
    assert found.verdict.cause == "straggler"
    assert [one.settings.prefetch for one in found.predictions if one.kind == "prefetch"] == [64]
    assert judge(replace(measured, head_idle_s=0.0)).shares.get("straggler") is None


def test_a_wait_while_all_workers_are_busy_is_no_straggler() -> None:
    measured = facts({"transform": 1.0, "straggler": 5.0}, COMPUTING, head_idle_s=0.0)
    assert judge(measured).cause == "cpu"


def test_a_capped_queue_has_cause_memory_only_if_more_would_help() -> None:
    measured = facts({"read": 0.5, "straggler": 5.0}, head_idle_s=3.75, is_capped=True)
    assert judge(measured).cause == "memory"
    hopeless = replace(READING, services_s=(0.1,) * 63 + (3.0,))
    assert judge(replace(measured, pools={"local": hopeless})).cause == "straggler"


def test_the_gpu_has_the_last_word() -> None:
    """The machine waits while the GPU still has work: nothing is lost."""
    measured = facts({"read": 6.0})
    verdict = judge(replace(measured, gpu_running_stall_s=0.1))
    assert verdict.cause == "consumer"
    assert "by CUDA events, it is idle for 1 %" in verdict.sentence
    starved = judge(replace(measured, gpu_running_stall_s=5.0))
    assert starved.cause == "storage"
    assert starved.sentence.endswith("The GPU waits for data for 50 % of the time, by CUDA events.")
    assert "GPU" not in judge(measured).sentence


def test_storage_is_unsure_on_a_full_machine_without_queue_times() -> None:
    measured = facts({"read": 4.5, "transform": 1.0}, replace(QUEUEING, queue_known_s=0.0), cpus=1.0)
    assert not judge(measured).is_sure
    assert judge(replace(measured, cpus=16.0)).confidence == pytest.approx(2 * judge(measured).confidence)


def test_more_data_and_a_clearer_cause_make_surer() -> None:
    clear, close = facts({"read": 6.0}), facts({"read": 4.0, "straggler": 1.9}, head_idle_s=1.425)
    assert judge(clear).cause == judge(close).cause == "storage"
    assert judge(clear).confidence > SURE > judge(close).confidence
    assert judge(replace(clear, batches=60)).confidence < judge(clear).confidence


seconds = st.floats(0.0, 50.0)


@pytest.mark.parametrize("name", TIMED)
def test_each_named_wait_has_a_cause_with_a_title(name: str) -> None:
    found = losses(facts({name: 6.0}, head_idle_s=6.0))
    assert (found.by_cause["unknown"] > 0.0) == (name == "unknown")


@given(
    causes=st.fixed_dictionaries(dict.fromkeys(TIMED, seconds)),
    made=st.lists(seconds, min_size=6, max_size=6),
    idle=st.lists(seconds, min_size=2, max_size=2),
    queued=st.none() | seconds,
    workers=st.integers(0, 8),
    prefetch=st.integers(1, 64),
    transfer_s=seconds,
    loop_queued_s=seconds,
)
def test_every_lost_second_has_one_cause(
    causes: dict[str, float],
    made: list[float],
    idle: list[float],
    queued: float | None,
    workers: int,
    prefetch: int,
    transfer_s: float,
    loop_queued_s: float,
) -> None:
    stages = dict(
        zip(("load_s", "load_cpu_s", "collate_s", "collate_cpu_s", "encode_s", "transit_s"), made, strict=True)
    )
    pools = {"local": pool(running=workers, queued_s=queued, **stages)}
    changes = {"pools": pools, "prefetch": prefetch, "head_idle_s": idle[0], "other_idle_s": idle[1]}
    measured = facts(causes, work_s=1.0, transfer_s=transfer_s, loop_queued_s=loop_queued_s, **changes)
    found = losses(measured)
    assert found.total_s == pytest.approx(measured.wait_s + transfer_s, abs=1e-9)
    assert min(found.by_cause.values()) >= -1e-9
    verdict: Verdict = judge(measured)
    assert 0.0 <= verdict.confidence <= 1.0


@given(share=st.floats(0.4, 0.6))
def test_two_causes_alike_are_never_told_apart_with_confidence(share: float) -> None:
    measured = facts({"read": 6.0 * share, "transform": 6.0 * (1.0 - share)}, pool(load_s=40.0, load_cpu_s=20.0))
    assert judge(measured).cause == "mixed"


@pytest.mark.parametrize(
    ("pool_name", "running", "requested", "workers"),
    [("local", 0, 2, 2), ("local", 1, 4, 4), ("local", 3, 2, 3), ("remote", 1, 4, 1)],
)
def test_workers_counts_starting_local_and_serving_remote_ones(
    pool_name: str, running: int, requested: int, workers: int
) -> None:
    """A script that looks at one batch ends the pass before all serve. On a cluster there may be no room for more."""
    sums = Reading(batches=1, pools={pool_name: PoolReading(running=running, requested=requested)})
    assert facts_of(sums, Subject()).workers == workers


COPYING: dict[str, Any] = {"feed_copy_s": 9.8, "feed_transform_s": 0.0, "feed_wait_s": 6.0}
TRANSFORMING: dict[str, Any] = {"feed_copy_s": 1.0, "feed_transform_s": 8.8, "feed_wait_s": 6.0}


def on_gpu(wait_s: float = 0.1, **changes: Any) -> Facts:
    """A run whose loop hardly waits for batches."""
    local = pool(load_s=4.0, load_cpu_s=4.0, services_s=(0.01,) * 64)
    return facts({"read": wait_s}, local, **{"gpu_running_stall_s": wait_s, "trainer_cpu_s": 0.0, **changes})


@pytest.mark.parametrize(
    ("changes", "where", "takes", "change", "rate"),
    [
        (COPYING, "copies to the device", "copying one takes 24.5 ms", "a quarter of the bytes (uint8", 100.0),
        (TRANSFORMING, "device transform", "the device transform takes 22 ms", "the device transform at half", 71.4),
    ],
)
def test_a_loop_that_waits_for_transfers_has_cause_transfer(
    changes: dict[str, Any], where: str, takes: str, change: str, rate: float
) -> None:
    found = diagnose(on_gpu(**changes))
    assert (found.verdict.cause, found.verdict.where, found.verdict.is_sure) == ("transfer", where, True)
    assert "waits for 60 % of the time for batches that are made and not ready on the device" in found.verdict.sentence
    assert takes in found.verdict.sentence
    assert found.advice.startswith(change)
    assert found.recommendation is not None
    assert found.recommendation.rate == pytest.approx(rate, rel=0.03)


def test_transfer_is_no_cause_when_copies_are_in_time() -> None:
    assert judge(on_gpu(**{**COPYING, "feed_wait_s": 0.4})).cause == "consumer"
    assert judge(on_gpu(5.0, **{**COPYING, "feed_wait_s": 1.0})).where == "the dataset"


def test_a_gpu_idle_while_batches_are_ready_is_no_loader_stall() -> None:
    seen = {"kernel_seen_s": 1.0, "supplied_s": 1.0}
    found = diagnose(on_gpu(kernel_s=0.4, kernel_supplied_s=0.4, **seen))
    assert found.verdict.cause == "consumer"
    assert "While batches are ready the GPU runs kernels for 40 % of the time by NVML" in found.verdict.sentence
    assert found.to_dict()["facts"]["supplied_s"] == 1.0
    assert "NVML" not in judge(on_gpu(kernel_s=0.97, kernel_supplied_s=0.97, **seen)).sentence
