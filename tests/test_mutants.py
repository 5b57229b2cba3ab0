"""The list of mutants is true of the code, and the tool that applies them tells those that survive."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, main

NAMES = [mutant.name for mutant in MUTANTS]


@pytest.mark.parametrize("mutant", MUTANTS, ids=NAMES)
def test_each_mutant_can_be_applied_and_its_test_exists(mutant: Mutant) -> None:
    text = (ROOT / mutant.file).read_text()
    assert text.count(mutant.text) == 1
    ast.parse(text.replace(mutant.text, mutant.by))
    file, _, name = mutant.test.partition("::")
    defined = {node.name for node in ast.parse((ROOT / file).read_text()).body if isinstance(node, ast.FunctionDef)}
    assert name in defined


def test_names_are_unique_and_listed_for_contributors() -> None:
    assert len(set(NAMES)) == len(NAMES)
    page = (ROOT / "docs/reference/drills.md").read_text()
    assert [line for line in page.splitlines() if line.startswith("| a mutant: ")] == [
        f"| a mutant: {mutant.name} | `{mutant.file}` | `{mutant.test.removeprefix('tests/')}` |" for mutant in MUTANTS
    ]


def test_a_mutant_that_no_test_notices_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a tree of one function with one test."""
    (tmp_path / "dpex").mkdir()
    (tmp_path / "tests").mkdir()
    (tmp_path / "dpex" / "__init__.py").touch()  # else the real package would be found first
    (tmp_path / "dpex" / "sums.py").write_text("def total(a, b):\n    return a + b\n")
    (tmp_path / "tests" / "test_sums.py").write_text(
        "from dpex.sums import total\n\n\ndef test_total():\n    assert total(2, 2) == 4\n"
    )
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\npythonpath = ["."]\n')
    minus, times = (
        Mutant(name=by, file="dpex/sums.py", text="a + b", by=by, test="tests/test_sums.py::test_total")
        for by in ("a - b", "a * b")
    )
    assert main([], [minus], tmp_path) == 0
    assert main([], [minus, times], tmp_path) == 1
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in said] == ["noticed", "noticed", "SURVIVES"]
