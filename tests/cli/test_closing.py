"""What `dpex run` says at the end, of loaders whose measurements are given."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, replace
from typing import Any

import pytest

from dpex.autotune.types import Decision, Outcome, Settings
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.run import closing
from dpex.run.closing import _Served, lines, note, say_all
from tests.unit.diagnose.test_verdict import PLANTED

FACTS = PLANTED["reading"][2]


class Tuner:
    """What of a tuner is read."""

    def __init__(self, before: float, after: float) -> None:
        self.settings = Settings(local=7, prefetch=14)
        self.decisions: list[Decision] = [
            Decision(
                at=1.0,
                old=Settings(local=2, prefetch=4),
                new=self.settings,
                reason="too few",
                text="why",
                evidence={"wait": before},
                predicted_rate=40.0,
                predicted_wait=0.0,
                outcome=Outcome(rate=40.0, wait=after, kept=True, at=2.0),
            )
        ]


@dataclass(frozen=True, kw_only=True)
class Source:
    """As a `DiagnosisSource`."""

    tuner: Tuner | None = None
    facts: Any = FACTS

    def diagnose(self) -> Diagnosis:
        return diagnose(self.facts)


class Loader:
    """Something that dies."""

    batch_size = 4

    def __init__(self) -> None:
        self.dataset = [1]


def served(source: Any, given: int = 2, first: Any = None) -> _Served:
    loader = weakref.ref(Loader())
    return _Served(loader=loader, kind=(), told="a D of a R", given=given, rank=0, first=first or source, last=source)


def test_workers_and_the_wait_from_what_to_what_and_what_to_do_next() -> None:
    (line,) = lines([served(Source(tuner=Tuner(0.63, 0.11)))])
    before, after = line.split(" First: ")
    assert before == (
        "a D of a R: 2 workers became 7 local, prefetch 14, wait 61 % in all, 63 % at first and 11 % at the end, "
        "40 batches/s."
    )
    assert after.endswith(".")


def test_a_loader_that_was_made_anew_is_told_of_from_its_first_pass_to_its_last() -> None:
    first = Source(tuner=Tuner(0.8, 0.5))
    (line,) = lines([served(Source(tuner=Tuner(0.3, 0.02)), first=first)])
    assert "80 % at first and 2 % at the end" in line


def test_a_number_that_stays_is_not_said_to_become_something() -> None:
    (line,) = lines([served(Source(tuner=Tuner(0.5, 0.5)), given=7)])
    assert line.startswith(f"a D of a R: 7 workers, wait {100 * FACTS.wait_ratio:.0f} %, 40 batches/s.")
    (line,) = lines([served(Source(), given=1)])
    assert line.startswith("a D of a R: 1 worker, ")


def test_numbers_are_those_of_the_script_and_those_that_served() -> None:
    """Of a number that is tuned nothing is said as if the script gave it."""
    facts = replace(FACTS, is_tuned=True, pools={})
    (line,) = lines([served(Source(tuner=Tuner(0.5, 0.5), facts=facts))])
    assert "num_workers=" not in line
    fixed = served(Source())
    fixed.served_by = 4
    (line,) = lines([fixed])
    assert line.startswith("a D of a R: 2 workers became 4, ")


def test_a_run_that_was_too_short_is_said_to_be() -> None:
    (line,) = lines([served(Source(facts=replace(FACTS, batches=2)))])
    assert ": 2 workers, 2 batches, too few to say how long training waited. First: Let training run" in line


def test_loaders_in_which_most_time_passed_come_first_and_few_are_shown() -> None:
    many = [replace(FACTS, work_s=FACTS.work_s + number) for number in range(9)]
    told = list(lines([served(Source(facts=facts), given=number) for number, facts in enumerate(many)]))
    assert [line.split(": ")[1].split()[0] for line in told[:6]] == ["8", "7", "6", "5", "4", "3"]
    assert told[6:] == ["3 more loaders were served, in which less time passed"]


def test_loaders_without_batches_are_left_out() -> None:
    assert list(lines([served(Source(facts=replace(FACTS, batches=0)))])) == []


def test_other_ranks_say_nothing_and_a_loader_made_anew_is_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(closing, "_served", [])
    monkeypatch.setattr(closing, "_begin", lambda: None)
    monkeypatch.setattr(closing, "_pid", closing.os.getpid())
    for rank in (0, 0, 1):
        note(Loader(), 2 + rank, Source(), rank)  # type: ignore[arg-type]
    say_all()
    (line,) = capsys.readouterr().err.splitlines()
    package = __name__.partition(".")[0]
    assert line.startswith(f"dpex run: a Loader ({package}) of a list: 2 workers, ")
    say_all()
    assert capsys.readouterr().err == ""
