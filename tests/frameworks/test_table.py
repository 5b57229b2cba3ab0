"""The table of frameworks: each cell is shown by a test that exists."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs/reference/frameworks.md").read_text()
MATRIX = re.compile(r"^(?=\| (?:framework|streams|generators) \|)(?:\|.+\n)+", re.MULTILINE)
ROW = re.compile(r"^\| ([^|]+?) \| (W) \| `([\w/]+\.py)::(\w+)` \|$", re.MULTILINE)


def cells() -> dict[str, dict[str, str]]:
    """The matrices: W or - by framework and question."""
    found = {}
    for matrix in MATRIX.findall(PAGE):
        head, _, *rows = [line.strip("| ").split(" | ") for line in matrix.splitlines()]
        found |= {row[0].rpartition(" ")[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    return found


def shown() -> dict[str, dict[str, tuple[str, str, str]]]:
    """For each framework and question: W, the file, and the test."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return {name: {found[0]: found[1:] for found in ROW.findall(text)} for name, text in sections}


@cache
def defined(path: str) -> set[str]:
    tree = ast.parse((TESTS / path).read_text())
    return {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize("framework", cells())
def test_each_cell_is_shown_by_a_test_that_exists(framework: str) -> None:
    cases = {question: cell for question, cell in cells()[framework].items() if cell != "-"}
    assert {question: found[0] for question, found in shown()[framework].items()} == cases
    for _, path, name in shown()[framework].values():
        assert name in defined(path)


def test_every_section_is_in_the_matrix() -> None:
    assert list(shown()) == list(cells())
    assert len(cells()) == 12
