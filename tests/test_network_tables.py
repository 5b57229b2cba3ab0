"""The table of links: rates of rounds, ratios within a round, and what may be kept."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from benchmarks.network import __main__ as command
from benchmarks.network import tables

FAST, SLOW = "10 Gbit/s", "200 Mbit/s"


def measurement(link: str, number: int, contestant: str, settled: float) -> dict[str, Any]:
    return {"link": link, "round": number, "contestant": contestant, "settled": settled}


def rounds_of(link: str, *, auto: float) -> list[dict[str, Any]]:
    """Three rounds, of which the second is twice as fast for everybody."""
    rates = {"all local": 10.0, "2 local, 8 remote": 40.0, "auto": auto}
    return [
        measurement(link, number, name, rate * (2 if number == 1 else 1))
        for number in range(3)
        for name, rate in rates.items()
    ]


def test_ratios_are_of_the_same_round_and_links_that_miss_an_aim_come_first() -> None:
    found = tables.rates([*rounds_of(FAST, auto=40.0), *rounds_of(SLOW, auto=30.0)])
    slow, fast = tables.table(found).splitlines()[2:]
    assert slow == f"| {SLOW} | 10.0 | 40.0 | 30.0 | 3.00 (3.00 to 3.00) | 0.75 (0.75 to 0.75) (2 local, 8 remote) |"
    assert fast.startswith(f"| {FAST} | 10.0 | 40.0 | 40.0 | 4.00 (4.00 to 4.00) | 1.00 ")


@pytest.mark.parametrize(("auto", "is_behind"), [(38.0, False), (9.4, True), (35.0, True)])
def test_the_aims_are_95_percent_of_local_and_90_of_the_best(auto: float, is_behind: bool) -> None:
    (rounds,) = tables.rates(rounds_of(SLOW, auto=auto)).values()
    assert tables._behind(rounds) == is_behind


def test_a_run_of_few_rounds_or_of_changed_files_is_not_kept() -> None:
    run = {"commit": "c" * 40, "dirty": False, "measurements": rounds_of(FAST, auto=40.0)}
    assert tables.problems(run) == []
    assert tables.problems({**run, "dirty": True}) == ["it was not measured on a commit without changes"]
    few = [one for one in run["measurements"] if one["round"] < 2]
    assert tables.problems({**run, "measurements": few}) == [f"{FAST} has fewer rounds than 3"]


def test_the_commands_help_names_every_link(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    told = " ".join(capsys.readouterr().out.split())
    assert all(f"{number}: {link}" in told for number, link in enumerate(command.LINKS))


def runs_as(commit: str, monkeypatch: pytest.MonkeyPatch, asked: list[str]) -> None:
    """The command without networks: each measurement is noted, and the fourth is broken off."""

    def measured(link: Any, split: Any, window_s: float, **_: Any) -> dict[str, Any]:
        asked.append(command.name_of(split))
        if len(asked) == 4:
            raise KeyboardInterrupt
        return {"settled": float(len(asked))}

    monkeypatch.setattr(command, "why_not", lambda: "")
    monkeypatch.setattr(command, "commit", lambda root: (commit, False))
    monkeypatch.setattr(command, "measured", measured)


def test_a_run_that_was_ended_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    runs_as("c" * 40, monkeypatch, asked)
    options = ["--links", "0", "--rounds", "1", "--results", str(tmp_path / "run.json")]
    with pytest.raises(KeyboardInterrupt):
        command.main(options)
    assert command.main(options) == 0
    names = [command.name_of(split) for split in command.SPLITS]
    assert asked == [*names[:4], *names[3:]]
    assert [one["contestant"] for one in command.begun(tmp_path / "run.json")] == names
    runs_as("d" * 40, monkeypatch, asked)
    with pytest.raises(SystemExit, match="is of commit"):
        command.main(options)


def test_who_gets_no_batch_has_a_rate_of_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoNetwork:
        nodes, address, trainer = ("node",), ("10.0.0.1",), "trainer"

        def enter(self, name: str) -> list[str]:
            return [name]

    @contextmanager
    def network(links: Any) -> Iterator[NoNetwork]:
        yield NoNetwork()

    def run(command: Any, timeout: float, **_: Any) -> None:
        raise subprocess.TimeoutExpired(command, timeout)

    monkeypatch.setattr(command, "Network", network)
    monkeypatch.setattr(subprocess, "run", run)
    found = command.measured(command.LINKS[0], (0, 8), 10.0)
    assert found["settled"] == 0.0
    assert found["error"] == "it had not ended after 100 s"
