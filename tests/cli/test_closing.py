"""What `dpex run` says at the end, of loaders whose measurements are given."""

import weakref
from dataclasses import dataclass, replace
from typing import Any

from decisions import a_decision

from dpex.autotune.types import Outcome
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.measure.settings import Settings
from dpex.run.run_options import RunOptions
from dpex.run.served import Served, report_lines
from tests.unit.diagnose.test_verdict import PLANTED

FACTS = PLANTED["reading"][2]


class Tuner:
    """What of a tuner is read."""

    def __init__(self, before: float, after: float) -> None:
        self.settings = Settings(local=7, prefetch=14)
        outcome = Outcome(rate=40.0, wait=after, kept=True, at=2.0)
        self.decisions = [
            a_decision(old=Settings(local=2, prefetch=4), new=self.settings, evidence={"wait": before}, outcome=outcome)
        ]


@dataclass(frozen=True, kw_only=True)
class Source:
    """As a `DiagnosisSource`."""

    tuner: Tuner | None = None
    facts: Any = FACTS

    def diagnose(self) -> Diagnosis:
        return diagnose(self.facts)


def served(source: Any, given: int = 2, served_by: int | None = None) -> Served:
    return Served(
        loader=weakref.ref(set()),  # which is gone
        kind=(),
        words="a D of a R",
        given=given,
        served_by=served_by,
        rank=0,
        source=source,
    )


def printed(*loaders: Served, **options: Any) -> list[str]:
    return list(report_lines(RunOptions(**options), [(one, one.source.diagnose()) for one in loaders]))


def test_closing_prints_old_and_new_workers_wait_and_report() -> None:
    line, _, report, *_ = printed(served(Source(tuner=Tuner(0.63, 0.11))))
    assert line == (
        "dpex run: a D of a R: 2 workers became 7 local, prefetch 14, wait 61 % in all, 63 % at first and 11 % at the "
        "end, 40 batches/s"
    )
    assert report == str(diagnose(FACTS))
    assert "\nFirst: " in report
    assert len(printed(served(Source()), full=True)[2]) > len(report)


def test_a_number_that_stays_is_not_said_to_become_something() -> None:
    for loader, words in (
        (served(Source(tuner=Tuner(0.5, 0.5)), given=7), "7 workers, wait 61 %"),
        (served(Source(), given=1), "1 worker, wait 61 %"),
        (served(Source(), served_by=4), "2 workers became 4, wait 61 %"),
        (served(Source(facts=replace(FACTS, batches=2))), "2 workers, 2 batches, too few to say how long training"),
    ):
        assert printed(loader)[0].startswith(f"dpex run: a D of a R: {words}")


def test_few_loaders_are_shown_and_one_is_reported_on() -> None:
    told = printed(*(served(Source(), given=number) for number in range(9)), command="diagnose")
    assert [line.split(": ")[2].split()[0] for line in told[:6]] == ["0", "1", "2", "3", "4", "5"]
    assert told[6:8] == ["dpex diagnose: 3 more loaders were served, in which less time passed", ""]
    assert sum(line.startswith("dpex diagnosis of") for line in told) == 1
