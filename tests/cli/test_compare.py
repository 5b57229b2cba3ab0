"""`dpex compare`: two diagnoses of real runs, its conditions, and its exit status."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from families import Augmented

from dpex import DpexDataLoader
from dpex.cli.main import main


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Files with the diagnoses of a loader with one worker, and with eight."""
    folder = tmp_path_factory.mktemp("reports")
    return written(folder / "one.json", 1), written(folder / "eight.json", 8)


def written(path: Path, workers: int) -> str:
    with DpexDataLoader(Augmented(400, 0.004), batch_size=4, num_workers=workers) as loader:
        for _ in loader:
            pass
        path.write_text(json.dumps(loader.diagnose().to_dict()))
    return str(path)


def test_both_are_shown_with_their_ratio(reports: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", *reports]) == 0
    lines = {line.split("  ")[0]: line.split() for line in capsys.readouterr().out.splitlines()}
    first, second, ratio = lines["batches/s"][-3:]
    assert float(second) > float(first)
    assert float(ratio[:-1]) == pytest.approx(float(second) / float(first), abs=0.02)
    assert "verdict" in lines


@pytest.mark.parametrize(
    ("condition", "status"),
    [("rate < 1.2x", 0), ("rate > 1.2x", 1), ("wait > 101%", 0), ("wait >= 0%", 1), ("cost < 0.001", 0)],
)
def test_conditions_set_the_exit_status(reports: tuple[str, str], condition: str, status: int) -> None:
    assert main(["compare", *reports, "--fail-if", condition]) == status


@pytest.mark.parametrize(
    ("condition", "reason"),
    [("wait is low", "give NAME < VALUE"), ("speed > 1", "names: rate, wait"), ("stall > 5%", "was not measured")],
)
def test_a_condition_that_cannot_be_used(
    reports: tuple[str, str], condition: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *reports, "--fail-if", condition]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    "text", ["", "[]", '{"version": 1}', '{"version": 4}', '{"version": 4, "facts": 1, "verdict": 2}']
)
def test_a_file_that_is_no_diagnosis(
    reports: tuple[str, str], text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    assert main(["compare", reports[0], str(path)]) == 2
    assert f"{path}: {'not' if 'version' in text else 'it is no diagnosis'}" in capsys.readouterr().err
