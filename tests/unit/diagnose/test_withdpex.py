"""What dpex would have given, from known work."""

from __future__ import annotations

from dataclasses import replace

from dpex.diagnose.diagnosis import diagnose
from dpex.diagnose.facts import PoolFacts
from dpex.dropin.stock.projection import with_dpex
from tests.unit.diagnose.test_whatif import waiting

SCRIPT = ("train.py", "--name", "a b")


def test_missing_workers_are_named_with_the_command() -> None:
    found = with_dpex(diagnose(waiting(step_s=0.01)), SCRIPT, is_stream=False)
    assert found.settings is not None
    assert found.settings.workers >= 10
    assert found.wait is not None
    assert found.wait < 0.03
    assert found.command == "dpex run train.py --name 'a b'"
    assert f"{found.settings} instead of 4 local, prefetch 8: the wait falls from 60 % to about" in found.sentence
    assert found.to_dict()["settings"]["local"] == found.settings.local


def test_a_loader_without_workers_needs_a_word_more() -> None:
    here = PoolFacts(tickets=400, load_s=40.0, load_cpu_s=0.4, services_s=(0.1,) * 64)
    facts = replace(waiting(step_s=0.01, workers=1), pools={"inline": here}, prefetch=1)
    found = with_dpex(diagnose(facts), SCRIPT, is_stream=False)
    assert found.command == "dpex run --also-in-process train.py --name 'a b'"


def test_where_nothing_is_lost_there_is_nothing_to_gain() -> None:
    found = with_dpex(diagnose(waiting(step_s=0.1)), SCRIPT, is_stream=False)
    assert (found.command, found.settings) == ("", None)
    assert found.sentence.startswith("With dpex: no setting loses less; the wait stays at about 0 %")


def test_a_stream_keeps_its_workers() -> None:
    found = with_dpex(diagnose(waiting(step_s=0.01)), SCRIPT, is_stream=True)
    assert (found.command, found.settings) == ("", None)
    assert "an IterableDataset keeps its number of workers" in found.sentence


def test_of_too_little_nothing_is_said() -> None:
    found = with_dpex(diagnose(waiting(step_s=0.01, batches=20)), SCRIPT, is_stream=False)
    assert (found.wait, found.command) == (None, "")
