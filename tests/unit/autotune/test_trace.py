"""What is written is read again exactly, and what cannot be read is refused by name and line."""

import json
from dataclasses import fields, replace
from typing import Any

import pytest
from decisions import a_decision
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulation.replay import Trace, TraceError, TraceOrigin, read
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.trace import FORMAT, VERSION, Recorder, line
from dpex.autotune.runtime.tuned import Tuned
from dpex.autotune.types import Decision, Outcome
from dpex.measure.pool_reading import PoolReading
from dpex.measure.reading import Reading
from dpex.measure.record import Record, as_json
from dpex.measure.settings import Settings

NOW_S = 1_800_000_000.25
MACHINE = {"name": "here", "cpus": 8}
ORIGIN = TraceOrigin(
    config=AutotuneConfig(max_local=3), start=Settings(local=2, prefetch=4), limits=Limits(local=3, memory=1e9)
)
DECISION = a_decision(evidence={"rate": 0.1})


def a_header(at: float) -> dict[str, Any]:
    return {"format": FORMAT, "version": "3.0", "dpex": "0.1.0", "started_s": NOW_S - at, "machine": MACHINE}


def complete(kind: type, **some: Any) -> Any:
    return st.builds(kind, **{field.name: ... for field in fields(kind)} | some)


def empty(record: Record) -> dict[str, Any]:
    """The fields that no trace holds, as those of a record that is empty."""
    return {name: st.just(getattr(record, name)) for name, one in record.declared().items() if not one.is_traced}


POOLS = complete(PoolReading, **empty(PoolReading()))
SETTINGS = complete(Settings)
NAMED = st.fixed_dictionaries({"local": POOLS, "remote": POOLS})
WINDOWS = complete(Reading, settings=SETTINGS, pools=NAMED, **empty(Reading()))
DECISIONS = complete(Decision, old=SETTINGS, new=SETTINGS, outcome=st.none() | complete(Outcome))


def window(at: float, **changes: Any) -> Reading:
    return Reading(**{"at": at, "seconds": 1.0, "settings": Settings(local=2, prefetch=4)} | changes)


def a_recorder() -> tuple[Recorder, list[bytes]]:
    """A recorder after its header, and the lines that it makes."""
    lines: list[bytes] = []
    recorder = Recorder(lambda record: lines.append(line(record).encode("ascii")), a_header)
    recorder.origin(**vars(ORIGIN), at=1.0)
    return recorder, lines


def a_trace() -> list[bytes]:
    """Header, three windows, two decisions of which the first is judged, another law, a window."""
    recorder, lines = a_recorder()
    recorder.window(window(1.0, pools={"local": PoolReading(services_s=(0.1, 0.2))}))
    recorder.decision(DECISION)
    recorder.window(window(2.0))
    recorder.outcome(0, Outcome(rate=1.5, wait=0.25, kept=False, at=2.0))
    recorder.window(window(3.0))
    recorder.decision(DECISION)
    recorder.origin(**vars(replace(ORIGIN, why="local=3 is fixed by resize()")), at=3.0)
    recorder.window(window(4.0))
    return lines


def strict(text: bytes) -> Any:
    def refuse(name: str) -> None:
        raise AssertionError(f"{name} is no JSON")

    return json.loads(text, parse_constant=refuse)


@given(st.lists(WINDOWS, min_size=1, max_size=3))
def test_windows_come_back(windows: list[Reading]) -> None:
    recorder, lines = a_recorder()
    for each in windows:
        recorder.window(each)
    assert all(strict(text) for text in lines)
    trace = read(lines, "t")
    assert as_json(trace.windows) == as_json(windows)
    assert trace.decisions == ()


@given(DECISIONS)
def test_decisions_come_back(decision: Decision) -> None:
    recorder, lines = a_recorder()
    recorder.window(window(1.0))
    number = recorder.decision(decision)
    if decision.outcome is not None:
        recorder.outcome(number, decision.outcome)
    assert all(strict(text) for text in lines)
    assert as_json(read(lines, "t").decisions) == as_json([decision])


def test_a_run_comes_back() -> None:
    lines = a_trace()
    kinds = [strict(text)["kind"] for text in lines]
    assert kinds == ["header", "window", "decision", "window", "outcome", "window", "decision", "renewed", "window"]
    trace = read(lines, "t")
    assert (trace.header.dpex, trace.header.machine) == ("0.1.0", MACHINE)
    assert trace.header.started_s == NOW_S - 1.0  # the first window's ``at`` is 1 s later
    first, second = trace.sections
    assert first.origin == ORIGIN
    assert [step.decision for step in first.steps] == [0, None, 1]
    assert second.origin == replace(ORIGIN, why="local=3 is fixed by resize()")
    assert [one.at for one in trace.windows] == [1.0, 2.0, 3.0, 4.0]
    assert trace.windows[0].local.services_s == (0.1, 0.2)
    assert [decision.outcome and decision.outcome.rate for decision in trace.decisions] == [1.5, None]
    assert not trace.is_torn


def test_a_start_from_another_run_is_read_as_it_was_given() -> None:
    recorder, lines = a_recorder()
    for start in (Tuned(local=2, prefetch=16), {"dpex_tuned": 1}, "found.json", None):
        recorder.origin(**vars(replace(ORIGIN, config=AutotuneConfig(start=start))), at=1.0)
    starts = [section.origin.config.start for section in read(lines, "t").sections[1:]]
    assert starts == [vars(Tuned(local=2, prefetch=16)), {"dpex_tuned": 1}, "found.json", None]


def test_wherever_a_run_dies_what_is_whole_is_read() -> None:
    text = b"".join(a_trace())
    header = text.index(b"\n") + 1
    whole = read(a_trace(), "t").windows
    for end in range(header, len(text) + 1):
        trace = read(text[:end].splitlines(keepends=True), "t")
        assert as_json(trace.windows) == as_json(whole[: len(trace.windows)])
        complete = text[:end].endswith((b"\n", b"}")) and text[end : end + 1] in (b"", b"\n")
        assert trace.is_torn == (not complete and not text[:end].endswith(b"\n"))


def test_a_broken_line_is_named() -> None:
    lines = a_trace()
    lines[3] = lines[3][:30] + b"\n"
    with pytest.raises(TraceError, match=r"^t\.jsonl, line 4: broken \(no JSON object\).*head -n 3 t\.jsonl"):
        read(lines, "t.jsonl")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"at": None}, "NoneType"),
        ({"settings": 3}, "Settings: 3 where an object"),
        ({"pools": {"local": {"services_s": {"a": 1}}}}, "to float: 'a'"),
        ({"kind": "decision", "number": 7}, "decision 7 where 1 should be"),
        ({"kind": "outcome", "number": 7}, "outcome of decision 7, and there are 1"),
        ({"kind": "outcome", "number": -1}, "outcome of decision -1"),
        ({"kind": "decision", "number": 1}, "Decision without 'old'"),
        ({"kind": "renewed"}, "origin"),
        ({"kind": "renewed", "origin": {"config": {"gain": 99}, "start": {}}}, "gain=99"),
    ],
)
def test_nonsense_is_named(change: dict[str, Any], message: str) -> None:
    lines = a_trace()
    lines[3] = line(strict(lines[3]) | change).encode()
    with pytest.raises(TraceError, match=r"t, line 4: broken .*" + message):
        read(lines, "t")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "^t: empty"),
        *(([a_trace()[0], text], r"^t, line 2: broken \(no JSON object") for text in (b"1\n", b"[]\n", b'"x"\n')),
        *(
            ([text], "^t, line 1: .*DPEX_TRACE")
            for text in (b"epoch,loss\n", b"{}\n", b'{"kind": "window"}\n', b"\x80\x02}q\x00.", b"[" * 99_999)
        ),
    ],
)
def test_what_is_no_trace_is_refused(lines: list[bytes], message: str) -> None:
    with pytest.raises(TraceError, match=message):
        read(lines, "t")


def with_header(**changes: Any) -> list[bytes]:
    header, *others = a_trace()
    return [line(strict(header) | changes).encode(), *others]


def test_another_version_is_refused_with_the_remedy() -> None:
    with pytest.raises(
        TraceError, match=r"t, line 1: a trace of version '4\.0', written by dpex 9\.1.*reads 3\.x: replay"
    ):
        read(with_header(version="4.0", dpex="9.1", origin={"unknown": 1}), "t")
    with pytest.raises(TraceError, match="version 'None'"):
        read(with_header(version=None), "t")


def test_what_a_newer_minor_version_adds_is_passed_over() -> None:
    header, first, decision, *others = map(strict, a_trace())
    news = {"brand_new": [1, {"a": None}]}
    header |= {"version": f"{VERSION[0]}.{VERSION[1] + 1}", "origin": header["origin"] | news}
    first |= {"pools": {"local": first["pools"]["local"] | news}, **news}
    decision |= {"reason": "a new reason", "old": decision["old"] | news}
    newer = [header, first, {"kind": "weather", "rain": True}, decision, *others]
    trace, plain_one = read([line(record).encode() for record in newer], "t"), read(a_trace(), "t")
    assert as_json(trace.windows) == as_json(plain_one.windows)
    assert trace.decisions[0] == replace(plain_one.decisions[0], reason="a new reason")
    assert trace.sections[0].origin == ORIGIN


def test_what_an_older_version_lacks_takes_defaults() -> None:
    old: list[dict[str, Any]] = [
        {
            "kind": "header",
            "format": FORMAT,
            "version": "3.0",
            "dpex": "0.1",
            "started_s": 0,
            "origin": {"config": {}, "start": {"local": 1}},
        },
        {"kind": "window", "at": 1, "seconds": 1, "settings": {}},
    ]
    trace: Trace = read([line(record).encode() for record in old], "t")
    assert as_json(trace.windows) == as_json([Reading(at=1, seconds=1, settings=Settings())])
    assert trace.sections[0].origin == TraceOrigin(config=AutotuneConfig(), start=Settings(local=1))
