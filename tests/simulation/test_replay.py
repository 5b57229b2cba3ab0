"""A recorded run is explained, and decided again as it was."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.simulation.replay import load, main, replay
from benchmarks.simulation.scenarios import load as scenarios
from benchmarks.simulation.score import cold_start
from benchmarks.simulation.simulator import simulate
from benchmarks.simulation.world import Phase, Step, Work, World
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.limits import Limits
from dpex.autotune.runtime.trace import FORMAT, Recorder, line
from dpex.autotune.supervisor import Supervisor
from dpex.autotune.types import Decision
from dpex.cli.main import main as dpex
from dpex.measure.reading import Reading
from dpex.measure.settings import Settings

ROOT = Path(__file__).parents[2]
WAIT = Phase(work=Work(wait_s=0.08, cpu_s=0.001), step=Step(gpu_s=0.005))
SLOW_STEP = Phase(at=12, step=Step(gpu_s=0.1))
BEGIN = Settings(local=2, prefetch=4)
SHIFT = World(cpus=2, noise=0.02, phases=(WAIT, SLOW_STEP))


def recorder(path: Path) -> Recorder:
    file = path.open("a")
    head = {"format": FORMAT, "version": "3.0", "dpex": "0.1.0", "machine": {}}
    return Recorder(lambda record: (file.write(line(record)), file.flush()), lambda at: {**head, "started_s": 1e9 - at})


@pytest.fixture
def shift(tmp_path: Path) -> Path:
    """Work that waits, and from 12 s on a consumer that is slow."""
    path = tmp_path / "trace.jsonl"
    simulate(SHIFT, [Supervisor(AutotuneConfig(), BEGIN, Limits(), recorder=recorder(path))], 30)
    return path


class Pinned:
    """As if resize(local=3) had been called after 8 s."""

    def __init__(self, into: Recorder) -> None:
        self.into = into
        self.law = Supervisor(AutotuneConfig(), BEGIN, Limits(), recorder=into)

    def begin(self) -> Settings:
        return BEGIN

    def step(self, window: Reading) -> Decision | None:
        if window.at > 8 and self.law.limits == Limits():
            pinned, why = Limits().fixed(local=3), "local=3 is fixed"
            self.law = Supervisor(
                AutotuneConfig(), Settings(local=3, prefetch=6), pinned, recorder=self.into, former=self.law, why=why
            )
        return self.law.step(window)


@pytest.fixture
def renewed(tmp_path: Path) -> Path:
    path = tmp_path / "trace.jsonl"
    simulate(SHIFT, [Pinned(recorder(path))], 20)
    return path


def shown(*arguments: Any) -> tuple[int, list[str]]:
    lines: list[str] = []
    code = main([*map(str, arguments)], lines.append)
    return code, "\n".join(lines).split("\n")


@pytest.mark.parametrize("family", sorted({scenario.family for scenario in scenarios().values()}))
def test_scenarios_are_decided_again_as_they_were(family: str, tmp_path: Path) -> None:
    scenario = next(each for each in scenarios().values() if each.family == family)
    world = scenario.world
    start = cold_start(world)
    paths = [tmp_path / f"{rank}.jsonl" for rank in range(world.ranks)]
    ranks = [Supervisor(AutotuneConfig(), start, Limits(), recorder=recorder(path)) for path in paths]
    simulate(world, ranks, min(scenario.seconds, 15))
    for path, rank in zip(paths, ranks, strict=True):
        trace = load(str(path))
        assert list(trace.decisions) == rank.decisions
        windows = replay(trace)
        assert [window.replayed for window in windows if window.replayed] == rank.decisions
        assert all(window.is_same for window in windows)


def test_each_law_is_made_anew_where_it_was(renewed: Path) -> None:
    trace = load(str(renewed))
    assert [section.origin.why for section in trace.sections] == ["", "local=3 is fixed"]
    assert all(trace.sections[1].steps)
    assert all(window.is_same for window in replay(trace))
    as_one = replace(trace.sections[0], steps=[step for section in trace.sections for step in section.steps])
    assert not all(window.is_same for window in replay(replace(trace, sections=(as_one,))))
    code, lines = shown(renewed)
    assert code == 0
    assert any(
        text.startswith("  renewed   3 local, prefetch 6 from 8") and "local=3 is fixed" in text for text in lines
    )
    assert any("limits: local=3, least_local=3" in text for text in lines)


def test_a_run_is_explained(shift: Path) -> None:
    trace = load(str(shift))
    code, lines = shown(shift)
    text = "\n".join(lines)
    assert code == 0
    assert max(map(len, lines)) <= 120
    assert lines[0] == "Recorded 2001-09-09 01:46:39 UTC by dpex 0.1.0"
    assert f"Decisions: {len(trace.decisions)}" in lines
    words = " ".join(text.split())
    for number, decision in enumerate(trace.decisions, 1):
        assert f"[{number}] at {decision.at:.2f} s: {decision.old} → {decision.new} ({decision.reason})" in words
        assert f"why {decision.text}" in words
    assert "replayed the same" in words
    assert lines[-1] == "This version of dpex decides the same on these windows."


def test_another_law_decides_otherwise(shift: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Still:
        def __init__(self, *_: object) -> None:
            self.decisions: list[Decision] = []

        def step(self, _: Reading) -> None:
            return None

    monkeypatch.setattr("benchmarks.simulation.replay.Supervisor", Still)
    code, lines = shown(shift)
    assert code == 1
    (number,) = [n for n, text in enumerate(lines) if "decides otherwise" in text]
    first = load(str(shift)).decisions[0]
    assert f"at {first.at:.2f} s" in lines[number]
    assert lines[number + 1 : number + 3] == [
        f"    recorded  {first.old} → {first.new} (too few)",
        "    replayed  nothing",
    ]
    assert any("recorded under the recorded settings" in text for text in lines)


def test_unreadable_traces_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "missing.jsonl", tmp_path):
        assert shown(path)[0] == 2
        assert str(path) in capsys.readouterr().err
    other = tmp_path / "other.csv"
    other.write_text("a,b\n1,2\n")
    assert shown(other)[0] == 2
    assert "other.csv, line 1" in capsys.readouterr().err


def test_the_former_command_names_its_successor(capsys: pytest.CaptureFixture[str]) -> None:
    assert dpex(["replay", "run.jsonl"]) == 2
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "python -m benchmarks.simulation.replay" in told
