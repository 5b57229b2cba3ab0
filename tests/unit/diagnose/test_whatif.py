"""Predictions and advice from known work, where it is clear what must come out."""

from dataclasses import replace
from typing import Any

import pytest
from decisions import a_decision
from hypothesis import given
from hypothesis import strategies as st

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.types import Outcome
from dpex.diagnose.diagnosis import Diagnosis, DiagnosisSource, diagnose
from dpex.diagnose.facts import Facts, Subject
from dpex.diagnose.findings import recommended
from dpex.diagnose.what_if import INLINE_S, WORTH, Prediction
from dpex.engine.snapshots import LoaderCounters
from dpex.measure.causes import TIMED
from dpex.measure.pool_reading import CallSums
from dpex.measure.settings import Settings
from tests.unit.autotune.test_tuning import Machine, run, tuned
from tests.unit.diagnose.test_verdict import PLANTED, facts, pool


def waiting(step_s: float, workers: int = 4, making_s: float = 0.1, batches: int = 400) -> Facts:
    """A run of workers that only wait, each batch as long, as it would be: the slower side sets the pace."""
    period_s = max(step_s, making_s / workers)
    made = pool(
        tickets=batches,
        load_s=batches * making_s,
        running=workers,
        services_s=(making_s,) * 64,
        calls={"load": CallSums(calls=50, wall_s=1.0)},
    )
    return facts(
        {"read": batches * (period_s - step_s)},
        made,
        batches=batches,
        work_s=batches * step_s,
        prefetch=2 * workers,
        trainer_cpu_s=0.0,
        is_cachable=True,
    )


def timed(calls: dict[str, float], *drawing: str) -> dict[str, CallSums]:
    """Calls of a sample by their seconds; those whose names begin so draw random numbers."""
    return {
        f"load > D.__getitem__ > {name}".removesuffix(" > "): CallSums(
            calls=50, wall_s=s, cpu_s=s, drawing=int(name.rpartition(" > ")[2].startswith(drawing or ("-",)))
        )
        for name, s in {"": 0.0, **calls}.items()
    } | {"load": CallSums(calls=50)}


def saturated(**changes: Any) -> Facts:
    """16 CPUs, all busy with 16 workers; a GPU that could take 33.5 batches/s and gets 12."""
    count, work_s = 240, 240 / 33.5
    wait_s = 20.0 - work_s
    calls = {"own code (d.py:2-9)": 0.1, "decode (d.py:3)": 0.61, "blur (d.py:4)": 0.29}
    made = pool(
        tickets=count,
        running=16,
        load_s=count * 1.25,
        load_cpu_s=count * 1.08,
        encode_s=count * 0.02,
        encode_cpu_s=count * 0.02,
        queued_s=count * 0.15,
        services_s=(1.27,) * 64,
        calls=timed(calls, "blur"),
    )
    values = {
        "is_cachable": True,
        "batches": count,
        "samples": 128 * count,
        "work_s": work_s,
        "cpus": 16.0,
        "prefetch": 32,
        "others_s": 3.0,
    }
    values |= {"trainer_cpu_s": 6.0, "gpu_running_stall_s": wait_s}
    return facts({"read": 0.1 * wait_s, "transform": 0.9 * wait_s}, made, **{**values, **changes})


def named(found: Diagnosis, start: str) -> Prediction:
    return next(one for one in found.predictions if one.change.startswith(start))


def predicted(measured: Facts, workers: int) -> Prediction:
    found = diagnose(measured).predict(Settings(local=workers, prefetch=2 * workers))
    assert found is not None
    return found


def told(found: Diagnosis) -> str:
    return " ".join(str(found).split())


@pytest.mark.parametrize("headroom", [1.0, 1.3])
def test_advice_and_tuner_have_the_same_headroom(headroom: float) -> None:
    config, now = AutotuneConfig(headroom=headroom), Settings(local=8, prefetch=16)
    tuner, loader = tuned(config, service_s=0.1, step_s=0.0105, start=now, machine=Machine(cpus=16.0))
    run(tuner, loader, 5.0)
    first = tuner.decisions[0]
    seen = waiting(first.evidence["step_s"], workers=first.old.local, making_s=first.evidence["service_s"])
    found = diagnose(replace(seen, config=config))
    assert named(found, "num_workers=").settings.local == first.new.local


def test_a_diagnosis_keeps_to_the_configuration_of_the_tuner() -> None:
    tuner, _ = tuned(AutotuneConfig(headroom=1.3))
    found = DiagnosisSource(book=LoaderCounters(), subject=Subject(), tuner=tuner).diagnose()
    assert found.facts.is_tuned
    assert found.facts.config == tuner.config


def test_a_waiting_dataset_gets_a_prediction_for_coroutines() -> None:
    measured = replace(waiting(step_s=0.0004, workers=64, making_s=0.08, batches=4000), concurrency=64)
    told_of = "a `dpex.AsyncDataset` with num_workers="
    found = named(diagnose(measured), told_of)
    assert found.change == f"{told_of}4 instead of 64 (1 worker would do what 64 do)"
    assert found.condition == "the storage serves 256 requests at a time as fast"
    assert (measured.rate, found.rate) == (pytest.approx(800, rel=0.02), pytest.approx(2500, rel=0.05))
    for other in (replace(measured, concurrency=0), replace(measured, is_asynchronous=True)):
        assert not any(one.kind == "awaited" for one in diagnose(other).predictions)
    computing = pool(tickets=4000, load_s=320.0, load_cpu_s=310.0, running=64)
    busy = replace(measured, pools={"local": computing})
    assert not any(one.kind == "awaited" for one in diagnose(busy).predictions)


def test_a_call_that_blocks_the_event_loop_is_named() -> None:
    seconds = {"load": 0.02, "load > Files.read": 0.0, "load > Files.read > socket.recv (f.py:7)": 0.08}
    rows = {name: CallSums(calls=400, wall_s=s) for name, s in seconds.items()}
    measured = replace(waiting(step_s=0.001), is_asynchronous=True, concurrency=64)
    measured = replace(measured, pools={"local": replace(measured.pools["local"], calls=rows)})
    found = diagnose(measured)
    assert (
        "(the dataset, 80 % of it in `socket.recv` (f.py:7), which blocks the event loop, so that the other samples of "
        "the worker cannot go on)"
    ) in found.verdict.sentence
    awaited = named(found, "`await asyncio.to_thread(...)` around `socket.recv` (f.py:7)")
    assert awaited.rate == pytest.approx(measured.rate / (1.0 - 0.8 * (1.0 - 1.0 / 12)), rel=0.02)
    assert not any("AsyncDataset" in one.change for one in found.predictions)
    sync = diagnose(replace(measured, is_asynchronous=False))
    assert "blocks the event loop" not in sync.verdict.sentence


def test_the_rate_of_waiting_workers_scales_with_their_number() -> None:
    measured = waiting(step_s=0.01)
    found = diagnose(measured)
    assert (measured.wait_ratio, measured.rate) == (pytest.approx(0.6, abs=0.01), pytest.approx(40.0))
    assert predicted(measured, 8).wait == pytest.approx(0.2, abs=0.02)
    assert predicted(measured, 2).wait == pytest.approx(0.8, abs=0.02)
    assert named(found, "`dpex.cached(dataset)`").wait == pytest.approx(0.0, abs=0.03)
    assert named(found, "the dataset at half").wait == pytest.approx(0.2, abs=0.02)


@pytest.mark.parametrize("name", [name for name, (cause, _, _) in PLANTED.items() if cause != "too-early"])
def test_the_present_setting_is_predicted_as_it_was_measured(name: str) -> None:
    measured = PLANTED[name][2]
    found = diagnose(measured).predict(
        Settings(local=measured.local_workers, remote=measured.remote_workers, prefetch=measured.prefetch)
    )
    assert found is not None
    assert found.wait == pytest.approx(measured.wait_ratio, abs=0.02)
    assert found.rate == pytest.approx(measured.batches / measured.wall_s, rel=0.03)


@pytest.mark.parametrize("name", PLANTED)
def test_no_change_is_shown_that_is_not_faster(name: str) -> None:
    found = diagnose(PLANTED[name][2])
    assert all(one.rate > (1.0 + WORTH) * found.facts.rate for one in found.predictions)
    assert all(0.0 <= one.low <= one.wait <= one.high <= 1.0 for one in found.predictions)
    assert all(one.rate_low <= one.rate <= one.rate_high for one in found.predictions)


shares, amounts = st.floats(0.0, 1.0), st.floats(0.0, 30.0)


@given(
    causes=st.dictionaries(st.sampled_from(TIMED), amounts),
    times=st.fixed_dictionaries(dict.fromkeys(("load_s", "collate_s", "encode_s"), st.floats(0.001, 60.0))),
    computing=shares,
    queued=shares,
    loop=st.fixed_dictionaries(
        {"work_s": st.floats(0.01, 30.0), "transfer_s": amounts, "trainer_cpu_s": amounts}
        | {"trainer_queued_s": st.none() | amounts, "loop_queued_s": amounts, "others_s": amounts}
        | {"gpu_running_stall_s": st.none() | amounts, "feed_wait_s": amounts, "feed_copy_s": amounts}
    ),
    subject=st.fixed_dictionaries(
        {name: st.booleans() for name in ("keeps_workers", "is_auto", "starts_anew", "has_cluster")}
        | {"streams": st.integers(0, 4), "shards": st.integers(0, 9), "cpus": st.floats(0.5, 16.0)}
        | {"concurrency": st.sampled_from([0, 64]), "prefetch": st.integers(1, 64), "passes": st.integers(1, 9)}
    ),
    workers=st.integers(0, 8),
)
def test_rate_step_and_wait_of_each_prediction_agree(
    causes: Any, times: Any, computing: float, queued: float, loop: Any, subject: Any, workers: int
) -> None:
    """A batch takes a step and a wait."""
    made = pool(running=workers, **times, load_cpu_s=computing * times["load_s"], queued_s=queued * times["load_s"])
    measured = facts(causes, made, **loop, **subject, is_cachable=True)
    assert measured.rate * measured.step_s + measured.wait_ratio == pytest.approx(1.0)
    found = diagnose(measured)
    for one in (*found.predictions, *filter(None, [found.beyond, found.predict(Settings(local=3, prefetch=6))])):
        assert one.rate * one.step_s + one.wait == pytest.approx(1.0), one
        assert 0.0 <= one.low <= one.wait + 1e-9 <= one.high + 2e-9 <= 1.0 + 3e-9
        assert one.rate_low <= one.rate * (1 + 1e-9)
        assert one.rate <= one.rate_high * (1 + 1e-9)


def test_intervals_widen_with_load_past_misses_and_little_data() -> None:
    def width(measured: Facts) -> float:
        found = named(diagnose(measured), "num_workers=")
        return found.rate_high - found.rate_low

    many = waiting(step_s=0.001, batches=6000)
    missed = a_decision(outcome=Outcome(rate=5.0, wait=0.5, kept=True, at=2.0))
    assert width(many) < width(replace(many, others_s=40.0))
    assert width(many) < width(replace(many, decisions=(missed,)))
    assert width(many) < width(waiting(step_s=0.001, batches=60))


@pytest.mark.parametrize("planted", ["computing", "computing in this process"])
def test_a_tuned_worker_count_is_not_called_num_workers(planted: str) -> None:
    """It would be looked for in the script, where another one stands."""
    facts = PLANTED[planted][2]
    assert [one for one in diagnose(facts).predictions if "num_workers" in one.change]
    tuned = diagnose(replace(facts, is_tuned=True))
    assert not [one for one in tuned.predictions if "num_workers=" in one.change]
    assert "num_workers=" not in tuned.held_back.replace('num_workers="auto"', "")


def test_nothing_is_predicted_from_nothing() -> None:
    found = diagnose(Facts())
    assert (found.predictions, found.predict(Settings(local=2, prefetch=4))) == ((), None)


SECONDS = {
    "own code (d.py:1-9)": 0.1,
    "open (d.py:2)": 0.2,
    "Compose.__call__ (d.py:3)": 0.0,
    "Compose.__call__ (d.py:3) > Decode.__call__ [c.py:5]": 0.2,
    "Compose.__call__ (d.py:3) > Crop.__call__ [c.py:5]": 0.3,
    "Compose.__call__ (d.py:3) > Crop.__call__ [c.py:5] > randint [c.py:9]": 0.0,
    "Compose.__call__ (d.py:3) > Normalize.__call__ [c.py:5]": 0.1,
    "target (d.py:4)": 0.1,
}


@pytest.mark.parametrize(
    ("drawing", "changes", "line", "part"),
    [
        ((), {}, "`dpex.cached(dataset)`", 1.0),
        (("Crop",), {}, "that ends before `Crop.__call__` (40 %", 0.4),
        (("randint",), {}, "that ends before `Crop.__call__` (40 %", 0.4),
        (("Decode",), {}, "that ends before `Compose.__call__` (d.py:3) (20 %", 0.2),
        (("Compose",), {}, "that ends before `Compose.__call__` (d.py:3) (20 %", 0.2),
        (("target",), {}, "that ends before `target` (d.py:4) (80 %", 0.8),
        (("Crop", "target"), {}, "that ends before `Crop.__call__` (40 %", 0.4),
        (("open",), {}, None, 0.0),
        (("",), {}, None, 0.0),
        ((), {"is_cachable": False}, None, 0.0),
        ((), {"calls": {}}, None, 0.0),
        ((), {"cache_hits": 5}, None, 0.0),
        ((), {"cache_misses": 5}, None, 0.0),
    ],
)
def test_a_cache_is_predicted_for_what_draws_nothing(
    drawing: tuple[str, ...], changes: dict[str, Any], line: str | None, part: float
) -> None:
    given = {"tickets": 100, "running": 1, "load_s": 10.0, "load_cpu_s": 10.0, "calls": timed(SECONDS, *drawing)}
    loop = {"batches": 100, "work_s": 0.1, "cpus": 1.0, "prefetch": 2, "is_cachable": changes.pop("is_cachable", True)}
    made = pool(services_s=(0.1,) * 64, **{**given, **changes})
    found = diagnose(facts({"transform": 10.0}, made, **loop))
    lines = [one for one in found.predictions if one.kind in ("cached", "divided")]
    assert [one.kind for one in lines] == ([] if line is None else ["divided" if "%" in line else "cached"])
    for one in lines:
        assert line is not None
        assert line in one.change
        assert one.rate == pytest.approx(min(100 / 0.1, 10.0 / (1.0 - 0.95 * part)), rel=0.2)


def test_an_argument_is_advised_before_other_code() -> None:
    """Workers that wait, and could be twice as many; a cache makes more, and needs another dataset."""
    measured = waiting(step_s=0.003, workers=1)
    made = replace(measured.pools["local"], calls=timed({"open (d.py:2)": 0.9, "crop (d.py:3)": 0.1}, "crop"))
    found = diagnose(replace(measured, pools={"local": made}))
    assert found.recommendation is not None
    assert found.recommendation.kind == "workers"
    assert found.advice.startswith("num_workers=16 instead of 1: 160 batches/s")
    assert found.beyond is not None
    assert found.beyond.rate > found.recommendation.rate
    assert (
        "Beyond that: `dpex.cached` around a dataset that ends before `crop` (d.py:3) (90 % of a sample)"
        in found.advice
    )
    assert f"instead of {found.recommendation.rate:.3g}" in found.advice
    assert [one.kind for one in found.predictions][:2] == ["workers", "divided"]


def test_a_second_worker_is_advised_before_a_cache_on_two_cpus() -> None:
    """Samples that are random at their end, one worker, and a CPU that is idle."""
    calls = timed({"open (d.py:2)": 3.0, "crop (d.py:3)": 0.5}, "crop")
    made = pool(tickets=120, running=1, load_s=6.7, load_cpu_s=6.7, services_s=(0.056,) * 64, calls=calls)
    values: dict[str, Any] = {"batches": 120, "work_s": 0.6, "cpus": 2.0, "prefetch": 2, "trainer_cpu_s": 0.1}
    found = diagnose(facts({"transform": 6.1}, made, is_cachable=True, **values))
    assert found.advice.startswith("num_workers=2 instead of 1: ")
    assert (
        "Beyond that: `dpex.cached` around a dataset that ends before `crop` (d.py:3) (86 % of a sample)"
        in found.advice
    )
    assert found.predictions[0].kind == "workers"


def test_fewer_workers_are_explained_by_starts_of_epochs() -> None:
    measured = waiting(step_s=0.001, workers=2, batches=100)
    started = replace(measured, causes={**measured.causes, "startup": 0.5}, starts_anew=True, passes=5)
    change = named(diagnose(started), "num_workers=").change
    assert "with persistent_workers=True: without it, each epoch starts them anew)" in change
    assert "persistent_workers" not in named(diagnose(replace(started, starts_anew=False)), "num_workers=").change


def test_a_saturated_machine_gets_no_more_workers() -> None:
    found = diagnose(saturated())
    assert found.verdict.cause == "cpu"
    assert {one.kind for one in found.predictions} == {"divided", "cheaper", "machines"}
    assert named(found, "`decode` (d.py:3), which computes, at half its cost").rate == pytest.approx(17, abs=0.5)
    assert found.advice.startswith("`dpex.cached` around a dataset that ends before `blur` (d.py:4) (61 % of a sample)")
    assert "instead of 12, and a wait of about 19 %" in found.advice
    assert found.end_of_stall.endswith("would end the stall. The costliest part is `decode` (d.py:3) (60 %).")


@pytest.mark.parametrize(("workers", "others", "queued_s"), [(16, 0.0, 36.0), (16, 15.0, None), (24, 4.0, 36.0)])
def test_advised_workers_do_not_exceed_the_cpus_under_any_load(
    workers: int, others: float, queued_s: float | None
) -> None:
    made = replace(saturated().pools["local"], queued_s=queued_s or 0.0, running=workers)
    made = replace(made, queue_known_s=0.0 if queued_s is None else made.busy_s)
    for one in diagnose(saturated(others_s=10.0 * others, pools={"local": made})).predictions:
        assert one.settings.local <= max(18, workers)


def test_storage_gets_the_workers_that_are_missing() -> None:
    found = diagnose(waiting(step_s=0.01))
    assert found.verdict.cause == "storage"
    best = found.recommendation
    assert best is not None
    assert 10 <= best.settings.workers <= 14
    assert best.wait < 0.03
    assert "100 batches/s" in found.advice
    assert found.end_of_stall.startswith("The training loop could take 100 batches/s. That needs 10 workers; 4 ran.")


def test_a_stream_gets_more_workers_only_if_it_is_divided() -> None:
    found = diagnose(replace(waiting(step_s=0.01), keeps_workers=True))
    assert {one.settings.workers for one in found.predictions} == {4}
    assert "That needs 10 streams; 4 ran. " in found.end_of_stall


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({"shards": 8, "is_auto": True}, "AutotuneConfig(max_streams=8), which reads 8 streams instead of 4: 80 "),
        ({"shards": 8}, "num_workers=8, which reads 8 streams instead of 4: 80 batches"),
        ({}, "num_workers=12, which reads 12 streams instead of 4: 100 batches"),
    ],
)
def test_a_stream_that_waits_gets_more_streams_first(changes: dict[str, Any], first: str) -> None:
    found = diagnose(replace(waiting(step_s=0.01), keeps_workers=False, streams=4))
    assert not [one for one in found.predictions if one.kind == "streams"]  # nothing waits for readers
    found = diagnose(replace(waiting(step_s=0.01), keeps_workers=True, streams=4, **changes))
    assert found.advice.startswith(first)
    condition = "the storage serves more readers as fast"
    divides = "" if changes else "the dataset divides itself among its workers and "
    assert f", if {divides}{condition}." in found.advice


def decoded(read_cpu_s: float, **changes: Any) -> Facts:
    """Decoders that compute for 1 ms, behind two readers that take 40 ms for a batch, beside steps of 5 ms."""
    made = pool(load_s=0.4, load_cpu_s=0.4, running=2, tickets=400)
    causes = {"stream": 6.0, "transform": 0.2}
    values = {"streams": 2, "read_s": 16.0, "read_cpu_s": read_cpu_s, "work_s": 2.0, "cpus": 4.0, "shards": 8}
    return facts(causes, made, **{**values, **changes})


def test_decoders_that_wait_for_readers_get_more_streams() -> None:
    found = diagnose(decoded(0.2))
    assert (found.verdict.cause, found.verdict.where) == ("storage", "the stream")
    assert found.advice.startswith("num_workers=8, which reads 8 streams instead of 2: ")
    computing = diagnose(decoded(15.9))
    assert computing.verdict.cause == "cpu"
    assert computing.advice.startswith("num_workers=4, which reads 4 streams instead of 2: ")


def beside_others(**changes: Any) -> Facts:
    """Two workers that compute for 41.5 ms a batch beside three busy programs on two CPUs, as measured. Alone they make
    24.1 batches/s."""
    made = pool(tickets=63, running=2, load_s=22.5, load_cpu_s=2.6, queued_s=19.0, services_s=(0.357,) * 63)
    causes = {"startup": 0.35, "transform": 0.7, "read": 4.5, "unknown": 0.15}
    values = {"batches": 63, "work_s": 6.1, "trainer_cpu_s": 0.71, "trainer_queued_s": 5.0, "cpus": 2.0, "prefetch": 4}
    return facts(causes, made, **{**values, "others_s": 17.0, **changes})


def test_other_programs_come_first_and_the_range_holds() -> None:
    found = diagnose(beside_others())
    best = found.recommendation
    assert best is not None
    assert (best.kind, best.rate > 2.0 * found.facts.rate) == ("free", True)
    assert best.rate_low <= 24.1 <= best.rate_high
    assert "with steps of " in found.advice


def test_other_programs_are_listed_if_only_workers_lack_cpus() -> None:
    found = diagnose(beside_others(trainer_queued_s=0.0, trainer_cpu_s=6.0))
    assert found.facts.held_s == 0.0
    assert found.recommendation is not None
    assert found.recommendation.kind == "free"


@pytest.mark.parametrize("others", [0.0, 0.2, 0.5])
def test_a_second_worker_that_computes_gets_the_free_cpu(others: float) -> None:
    made = pool(tickets=200, running=1, load_s=9.9, load_cpu_s=9.8, services_s=(0.05,) * 64)
    values: dict[str, Any] = {"batches": 200, "work_s": 0.5, "cpus": 2.0, "prefetch": 2, "trainer_cpu_s": 0.2}
    found = diagnose(facts({"transform": 9.5}, made, others_s=10.0 * others, **values))
    assert found.advice.startswith("num_workers=2 instead of 1: ")


def test_stragglers_get_a_prefetch_that_covers_them() -> None:
    times = tuple(0.01 if number % 16 else 0.15 for number in range(64))
    made = replace(PLANTED["stragglers"][2].pools["local"], load_s=7.5, load_cpu_s=0.4, services_s=times)
    found = diagnose(replace(PLANTED["stragglers"][2], pools={"local": made}))
    assert found.verdict.cause == "straggler"
    best = found.recommendation
    assert best is not None
    assert (best.kind, best.settings.prefetch) == ("prefetch", 64)
    assert best.rate > 60


def test_training_bound_runs_get_no_change() -> None:
    found = diagnose(waiting(step_s=0.1))
    assert found.verdict.cause == "consumer"
    assert found.recommendation is None
    assert found.advice == (
        "Look at the training step. It takes 10 batches/s and gets them; the loader cannot add to that."
    )
    assert found.end_of_stall == ""


def test_transfers_get_a_narrower_type() -> None:
    for name in ("network", "machine to device"):
        best = diagnose(PLANTED[name][2]).recommendation
        assert best is not None
        assert best.kind == "narrow"
        assert best.rate > 60


def test_starting_gets_persistent_workers_where_it_costs_most() -> None:
    measured = facts({"startup": 4.0, "read": 0.4, "transform": 0.4}, passes=5, starts_anew=True)
    best = diagnose(measured).recommendation
    assert best is not None
    assert best.change == "persistent_workers=True"
    assert best.rate == pytest.approx(40 / 0.72, rel=0.05)
    kept = diagnose(replace(measured, starts_anew=False)).recommendation
    assert kept is not None
    assert kept.change != "persistent_workers=True"


def test_without_workers_some_are_advised() -> None:
    best = diagnose(PLANTED["computing in this process"][2]).recommendation
    assert best is not None
    assert best.change == "num_workers=2 instead of 0"


def held(**changes: Any) -> Facts:
    """Steps of 7 ms that take 24 ms."""
    values = {"cpus": 2.0, "trainer_cpu_s": 2.6, "trainer_queued_s": 7.2, "others_s": 15.0} | changes
    return facts({"read": 0.15}, values.pop("local", pool(load_s=4.0, load_cpu_s=3.9)), **values)


def test_a_step_that_lacks_cpus_is_not_training_bound() -> None:
    found = diagnose(held())
    assert found.verdict.cause == "crowding"
    assert found.verdict.is_sure
    assert "takes 3.6 times its 6.89 ms, as other programs hold 1.5 of the 2 CPUs" in found.verdict.sentence
    assert found.verdict.sentence.endswith("The wait for batches is 2 % of the time.")
    assert "the step waiting for a CPU 71 %" in told(found)
    assert found.facts.held_ratio == pytest.approx(0.71, abs=0.01)
    assert found.facts.wait_ratio == pytest.approx(0.015)
    assert found.advice.startswith("without the other programs, which use 1.5 CPUs: ")


def test_the_loaders_own_workers_may_be_in_the_way() -> None:
    found = diagnose(held(others_s=0.0, local=pool(load_s=30.0, load_cpu_s=15.0, queued_s=15.0)))
    assert "as the loader's own workers hold 1.5 of the 2 CPUs" in found.verdict.sentence
    assert found.recommendation is not None
    assert found.recommendation.change == "num_workers=1 instead of 4"


def test_steps_that_seldom_wait_for_a_cpu_are_training_bound() -> None:
    """7 % of the time, beside programs that use 0.2 CPUs: as at the end of the demo."""
    found = diagnose(held(trainer_queued_s=0.75, others_s=2.0, local=pool(load_s=40.0, load_cpu_s=12.0)))
    assert found.facts.held_ratio == pytest.approx(0.07, abs=0.01)
    assert (found.verdict.cause, found.recommendation, found.end_of_stall) == ("consumer", None, "")
    assert "The training step takes 1.1 times its" in found.verdict.sentence


def test_a_program_is_blamed_for_its_part_of_the_cpus_only() -> None:
    own = pool(load_s=30.0, load_cpu_s=15.0, queued_s=15.0)
    found = diagnose(held(others_s=1.0, trainer_queued_s=2.0, local=own))
    assert found.verdict.cause == "crowding"
    assert not [one for one in found.predictions if one.kind == "free"]


def test_a_gpu_that_is_busy_all_the_same_lacks_no_cpu() -> None:
    assert diagnose(held(kernel_s=0.97, kernel_seen_s=1.0)).verdict.cause == "consumer"


@pytest.mark.parametrize(
    ("outcome", "why"),
    [
        (
            None,
            'num_workers="auto" is trying 12 local, prefetch 96, which should bring 97 batches/s and a wait of 2 %.',
        ),
        (Outcome(rate=31.0, wait=0.7, kept=False, at=2.0), 'num_workers="auto" has not settled yet.'),
    ],
)
def test_what_the_tuner_has_not_taken_is_told_with_the_reason(outcome: Outcome | None, why: str) -> None:
    growth = a_decision(new=Settings(local=12, prefetch=96), predicted_rate=97.0, predicted_wait=0.02, outcome=outcome)
    tuned = replace(waiting(step_s=0.01), is_tuned=True, decisions=(growth,))
    begun = replace(growth, reason="start", predicted_rate=0.0, outcome=None)
    assert diagnose(replace(tuned, decisions=(begun,))).held_back == 'num_workers="auto" has not settled yet'
    found = diagnose(tuned)
    assert not {one.kind for one in found.predictions} & {"workers", "prefetch"}
    assert found.advice.startswith(why)
    assert "Beyond the tuner: `dpex.cached(dataset)`" in found.advice


@pytest.mark.parametrize(
    ("rates", "first"),
    [
        ({"workers": 12.0, "cheaper": 15.0, "machines": 40.0}, "workers"),
        ({"workers": 10.5, "cheaper": 12.0, "machines": 40.0}, "cheaper"),
        ({"cheaper": 10.5, "machines": 40.0}, "machines"),
    ],
)
def test_code_comes_before_machines_and_arguments_before_code(rates: dict[str, float], first: str) -> None:
    known = {"change": "", "settings": Settings(), "step_s": 0.01, "wait": 0.5, "low": 0.5, "high": 0.5}
    found = [Prediction(kind=kind, rate=rate, rate_low=rate, rate_high=rate, **known) for kind, rate in rates.items()]
    chosen = recommended(found, 10.0)
    assert chosen is not None
    assert chosen.kind == first


def tiny(**changes: Any) -> Facts:
    """40,000 batches in 10 s that workers make in 20 µs and encode in 5 µs, under steps of 50 µs."""
    count = 40_000
    made = pool(tickets=count, load_s=count * 15e-6, collate_s=count * 5e-6, encode_s=count * 5e-6, running=2)
    values = {"batches": count, "samples": count, "work_s": count * 50e-6, **changes}
    return facts({"sampler": count * 5e-6, "unknown": 7.8}, made, **values)


def test_tiny_batches_are_better_made_in_the_training_process() -> None:
    for measured in (tiny(), tiny(is_tuned=True, is_auto=True)):
        found = diagnose(measured).recommendation
        assert found is not None
        assert found.change == "num_workers=0 instead of 2 workers"
        assert found.rate == pytest.approx(1 / (50e-6 + 20e-6 + 5e-6 + INLINE_S), rel=0.01)
        assert found.rate * found.step_s + found.wait == pytest.approx(1.0)
        assert found.rate_high == pytest.approx(1 / (50e-6 + INLINE_S), rel=0.01)


def test_nothing_is_predicted_beyond_the_training_process() -> None:
    """Batches there have other costs than in workers, where they were measured."""
    found = diagnose(tiny())
    assert found.recommendation is not None
    assert found.recommendation.kind == "inline"
    assert found.beyond is None


def test_workers_cost_the_loop_time_before_there_are_any() -> None:
    """Batches of 30 µs that the training process makes between steps of 10 µs: no number of workers is faster."""
    count = 40_000
    made = pool(tickets=count, load_s=count * 30e-6)
    values = {"batches": count, "samples": count, "work_s": count * 10e-6, "pools": {"inline": made}}
    measured = facts({"transform": count * 30e-6}, pool(), **values)
    assert measured.wait_ratio > 0.7
    found = diagnose(measured)
    assert found.predictions
    assert not any(one.settings.workers for one in found.predictions)


def test_the_training_process_is_advised_where_it_is_faster() -> None:
    """Not for work that workers share, pinned memory, coroutines, streams, or workers of the cluster."""
    remote = {"remote": pool(tickets=40_000, load_s=0.8, running=2)}
    others = [
        replace(tiny(), causes={**tiny().causes, "h2d": 0.1}),
        tiny(is_asynchronous=True),
        tiny(keeps_workers=True),
        tiny(pools=remote),
        replace(tiny(), pools={"local": pool(tickets=40_000, load_s=14.0, running=2)}),
    ]
    for measured in (*others, waiting(step_s=0.01), saturated()):
        assert not any(one.kind == "inline" for one in diagnose(measured).predictions)
