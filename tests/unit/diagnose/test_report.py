"""What people and programs are shown: complete, escaped, and without anything from elsewhere."""

import json
import re
from dataclasses import replace
from html import unescape
from html.parser import HTMLParser
from math import inf
from pathlib import Path

import pytest
from decisions import a_decision

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law.law import Law
from dpex.autotune.types import Outcome
from dpex.diagnose.diagnosis import Diagnosis, diagnose
from dpex.diagnose.report import COLUMNS, sections, text
from dpex.diagnose.report import full as full_text
from dpex.measure.causes import CAUSES
from dpex.measure.pool_reading import CallSums, PoolReading
from dpex.measure.sampling import FailedSample, SlowIndex
from tests.unit.diagnose.test_verdict import PLANTED

HOSTILE = "<script>alert('x')</script>&"
VOID = {"meta", "br", "img", "link"}


def page_of(found: Diagnosis, folder: Path, *last: str) -> str:
    return found.write_html(folder / "report.html", last).read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def full() -> Diagnosis:
    """With everything that may be there."""
    facts = PLANTED["reading"][2]
    timed = replace(facts.pools["local"], calls={HOSTILE: CallSums(calls=10, wall_s=0.5, cpu_s=0.1)})
    facts = replace(
        facts,
        name=HOSTILE,
        dataset=HOSTILE,
        rank=3,
        slow_samples=(SlowIndex(1.2, HOSTILE, 2, 2.0),),
        pools={"local": timed},
        decisions=(a_decision(outcome=Outcome(rate=9.0, wait=0.14, kept=True, at=2.0)), a_decision()),
        untimed=HOSTILE,
    )
    return diagnose(facts)


class Tags(HTMLParser):
    """Opens and closes what it should, and notes what it saw."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.attributes: list[tuple[str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.add(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.parametrize("name", PLANTED)
def test_text_and_data_of_every_verdict(name: str) -> None:
    diagnosis = diagnose(PLANTED[name][2])
    text = diagnosis.full
    assert str(diagnosis) == repr(diagnosis) == text[: len(str(diagnosis))]
    assert len(str(diagnosis).splitlines()) <= 24
    assert CAUSES[diagnosis.verdict.cause].title.upper() in text
    for title in ("How do we know", "What was not measured"):
        assert title in text
    is_to_change = diagnosis.verdict.cause not in ("too-early", "consumer")
    assert ("What would change it" in text) == (is_to_change and bool(diagnosis.predictions))
    assert "First: " in text
    data = json.loads(json.dumps(diagnosis.to_dict(), allow_nan=False))
    assert data["version"] == 6
    assert data["verdict"]["cause"] == diagnosis.verdict.cause
    assert data["facts"]["batches"] == diagnosis.facts.batches
    assert len(data["predictions"]) == len(diagnosis.predictions)


def test_data_has_names_of_classes_and_all_properties(full: Diagnosis) -> None:
    facts = replace(full.facts, config=AutotuneConfig(policy=Law), others_s=inf)
    data = json.loads(json.dumps(diagnose(facts).to_dict(), allow_nan=False))
    assert data["facts"]["config"]["policy"] == "Law"
    assert data["facts"]["others_s"] is None
    assert data["facts"]["pools"]["local"]["busy_s"] == facts.pools["local"].busy_s
    assert data["facts"]["rate"] == facts.rate
    assert data["advice"] == diagnose(facts).advice


def test_the_page_is_whole_and_loads_nothing(full: Diagnosis, tmp_path: Path) -> None:
    page = page_of(full, tmp_path)
    tags = Tags()
    tags.feed(page)
    assert tags.open == []
    assert tags.seen.isdisjoint({"script", "link", "img", "iframe"})
    assert {name for name, _ in tags.attributes}.isdisjoint({"src", "href", "onload", "onclick"})
    assert re.findall(r"url\(|@import|https?:", page) == []
    assert "color-scheme: light dark" in page


def test_what_users_named_is_escaped_on_the_page(full: Diagnosis, tmp_path: Path) -> None:
    page = page_of(full, tmp_path)
    assert HOSTILE not in page
    assert page.count("&lt;script&gt;") >= 5
    assert HOSTILE in str(full)


def test_everything_there_is_told(full: Diagnosis) -> None:
    text = full.full
    assert "rank 3" in text
    for title in ("Calls", "Slowest samples"):
        assert title in text
    assert re.search(r"1\.2 s +96 +2$", text, re.MULTILINE)


def test_what_failed_is_on_the_screen_even_where_nothing_is_slow() -> None:
    facts = PLANTED["consumer"][2]
    assert "Warning" not in str(diagnose(facts))
    latest = (FailedSample("7", "OSError: gone"), FailedSample("8", "OSError: torn"))
    pools = {**facts.pools, "remote": PoolReading(failed_nodes=("node a gets no workers", "node b too"))}
    failed = replace(facts, failed_samples=3, latest_failed=latest, pools=pools)
    text = str(diagnose(failed))
    assert "Warning: 3 samples could not be loaded, and other samples have the places. The latest is index 8:" in text
    assert "Warning: Node a gets no workers\n\nWarning: Node b too" in text


@pytest.mark.parametrize("name", PLANTED)
def test_the_page_has_the_lines_of_the_full_report(name: str, tmp_path: Path) -> None:
    diagnosis = diagnose(PLANTED[name][2])
    page = page_of(diagnosis, tmp_path, "To tune it, run:", "  dpex run train.py")
    shown = unescape(re.sub(r"<[^>]+>", "", page[page.index("<pre>") : page.index("</pre>")]))
    assert shown.splitlines() == [*full_text(diagnosis, 80).splitlines(), "", "To tune it, run:", "  dpex run train.py"]
    assert page.count("font-weight: bold") >= 4


@pytest.mark.parametrize("columns", [COLUMNS, 80])
@pytest.mark.parametrize("name", PLANTED)
def test_lines_fit_a_terminal_and_no_percent_sign_begins_one(name: str, columns: int) -> None:
    lines = full_text(diagnose(PLANTED[name][2]), columns).splitlines()
    assert max(map(len, lines)) <= columns
    assert not any(line.strip().startswith("%") for line in lines)


def test_a_report_says_why_a_stream_is_read_by_so_many() -> None:
    why = "The dataset is read in 8 streams for its 64 shards, as num_workers says so."
    found = diagnose(replace(PLANTED["reading"][2], why_streams=why))
    assert f"  - {why}" in text(found)


def test_a_report_is_wrapped_at_the_width_of_the_terminal() -> None:
    found = diagnose(PLANTED["queueing for CPUs"][2])
    narrow = text(found, 60)
    assert max(map(len, narrow.splitlines())) <= 60
    assert narrow.split() == text(found).split()


def test_a_sample_that_took_less_than_the_mean_is_no_slow_one() -> None:
    reading = PLANTED["reading"][2]
    slow, quick = SlowIndex(2.0 * reading.sample_s, "17", 1, 0.0), SlowIndex(0.3 * reading.sample_s, "23", 1, 0.0)
    assert "Slowest samples" not in diagnose(replace(reading, slow_samples=(quick,))).full
    (rows,) = [
        one.rows
        for one in sections(diagnose(replace(reading, slow_samples=(slow, quick))))
        if one.title == "Slowest samples"
    ]
    assert [row[0] for row in rows] == ["17"]
