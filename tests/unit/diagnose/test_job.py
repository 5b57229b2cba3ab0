"""The verdict on a job, from waits of its ranks that are made up."""

import json
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dpex.diagnose.job import JobDiagnosis, RankReport, judge

BATCHES, BATCH_S, WAIT_S = 200, 0.15, 0.1
NODES = ("a", "a", "b", "b")
Wait = Callable[[int, int], float]


def rank(number: int, waits: Sequence[float], **changes: Any) -> RankReport:
    told = {"title": f"title {number}", "sentence": f"sentence {number}.", "advice": f"advice {number}"}
    figures = {
        "batches": len(waits),
        "batch_s": BATCH_S,
        "step_s": 0.05,
        "supply_s": 0.0,
        "unevenness": 1.0,
        "wait_ratio": sum(waits) / BATCHES / BATCH_S,
    }
    known = {"rank": number, "node": NODES[number], "text": f"text {number}", "first": 0, **told, **figures}
    return RankReport(**{**known, "waits": waits, **changes})


def job(wait: Wait, batches: int = BATCHES, slow: tuple[int, ...] = (), **changes: Any) -> JobDiagnosis:
    """slow: ranks whose workers take the time of a step of the job for a batch."""
    each = [[wait(number, at) for at in range(batches)] for number in range(4)]
    return judge([rank(at, each[at], supply_s=BATCH_S * (at in slow), **changes) for at in range(4)])


def always(*ranks: int) -> Wait:
    return lambda number, _: WAIT_S if number in ranks else 0.0001


def test_rank_that_waits_while_no_other_does_starves_the_job() -> None:
    found = job(always(2))
    assert (found.verdict, found.culprits, found.since, found.until) == ("rank", (2,), 0, None)
    assert found.lost_ratio == pytest.approx(WAIT_S / BATCH_S, rel=0.01)
    text = " ".join(str(found).split())
    assert "RANK 2 STARVES THE JOB, in all batches" in text
    assert "Each batch costs all ranks 100 ms, 67 % of their time." in text
    assert "The cause is title 2: sentence 2." in text
    assert "First: on rank 2: advice 2" in text
    assert text.endswith("The report of rank 2: text 2")


@pytest.mark.parametrize(("begins", "ends", "until"), [(80, BATCHES, None), (40, 120, 119)])
def test_the_period_is_told(begins: int, ends: int, until: int | None) -> None:
    found = job(lambda number, at: WAIT_S if number == 1 and begins <= at < ends else 0.0)
    assert (found.verdict, found.culprits, found.since, found.until) == ("rank", (1,), begins, until)


def test_ranks_of_one_node_starve_the_job_together() -> None:
    found = job(always(2), slow=(2, 3))
    assert (found.verdict, found.culprits) == ("node", (2, 3))
    assert "NODE b STARVES THE JOB" in str(found)


def test_slow_ranks_of_two_nodes_starve_the_job_together() -> None:
    """Only one waits: the other has batches ready, and would wait if the first did not."""
    found = job(always(2), slow=(1, 2))
    assert (found.verdict, found.culprits) == ("rank", (1, 2))
    assert "RANK 1 AND 2 STARVE" in str(found)


@pytest.mark.parametrize("turn", [lambda at: at % 4, lambda at: at // 50, lambda at: random.Random(at).randrange(4)])
def test_straggler_that_moves_means_loading(turn: Callable[[int], int]) -> None:
    found = job(lambda number, at: WAIT_S if number == turn(at) else 0.0, unevenness=3.0)
    assert (found.verdict, found.culprits, found.since) == ("moving", (), None)
    assert "THE STRAGGLER MOVES" in str(found)


@pytest.mark.parametrize("wait", [always(0, 1, 2, 3), lambda number, at: WAIT_S if number == at % 4 else 0.0])
def test_ranks_that_are_all_slow_are_alike(wait: Wait) -> None:
    """Even if chance decides which of them waits."""
    found = job(wait, slow=(0, 1, 2, 3))
    assert (found.verdict, found.culprits) == ("alike", ())
    assert found.lost_ratio == pytest.approx(WAIT_S / BATCH_S)


def test_no_wait_is_no_loss() -> None:
    found = job(always())
    assert found.verdict == "none"
    assert "LOADING DOES NOT LIMIT THE JOB" in str(found)


def test_waits_without_a_step_between_predict_no_rate() -> None:
    """The ranks did not synchronise, so that their waits add up to more than the time of their batches."""
    text = " ".join(str(job(lambda number, at: 2 * BATCH_S * (number == at % 4), slow=(0, 1, 2, 3))).split())
    assert "The job makes 6.67 batches/s. Its rate without the loss is not known" in text
    assert "at most 150 ms, 100 % of their time" in text
    assert "000 batches/s" not in text


def test_no_loss_is_told_beyond_the_quickest_steps() -> None:
    found = job(lambda number, at: 2 * BATCH_S * (number == 2), quick_step_s=0.03)
    assert found.lost_ratio == pytest.approx(0.8)
    text = " ".join(str(found).split())
    assert "at most 120 ms, 80 % of their time" in text
    assert "is not known" in text


def test_few_batches_are_too_early() -> None:
    assert job(always(2), 10).verdict == "too-early"


def test_batches_are_compared_by_number() -> None:
    """A rank has kept the later part of its waits only, and is one batch behind."""
    waits = [WAIT_S * (at % 2) for at in range(BATCHES)]
    late = rank(0, waits[60:-1], first=60)
    found = judge([late, rank(1, waits), rank(2, [0.0] * BATCHES, node="a")], missing=[3])
    assert found.verdict == "alike"
    assert "No report came from rank 3." in str(found)


def test_report_is_json() -> None:
    found = job(always(2))
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert (told["verdict"], told["culprits"], told["ranks"][2]["title"]) == ("rank", [2], "title 2")
    sent = [RankReport(**json.loads(json.dumps(one.sent()))) for one in found.ranks]
    assert judge(sent).sentence == found.sentence
