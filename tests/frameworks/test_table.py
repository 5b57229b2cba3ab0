"""The table of frameworks: each cell is shown by a test."""

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs/reference/frameworks.md").read_text()
MATRIX = re.compile(r"^(?=\| (?:framework|streams|generators) \|)(?:\|.+\n)+", re.MULTILINE)
ROW = re.compile(r"^\| ([^|]+?) \| (W) \| `[\w/]+\.py::\w+` \|$", re.MULTILINE)


def cells() -> dict[str, dict[str, str]]:
    """The matrices: W or - by framework and question."""
    found = {}
    for matrix in MATRIX.findall(PAGE):
        head, _, *rows = [line.strip("| ").split(" | ") for line in matrix.splitlines()]
        found |= {row[0].rpartition(" ")[0]: dict(zip(head[1:], row[1:], strict=True)) for row in rows}
    return found


def shown() -> dict[str, dict[str, str]]:
    """W by framework and question that has a test."""
    parts = re.split(r"^## (.+)$", PAGE, flags=re.MULTILINE)[1:]
    sections = zip(parts[::2], parts[1::2], strict=True)
    return {name: dict(ROW.findall(text)) for name, text in sections}


@pytest.mark.parametrize("framework", cells())
def test_each_cell_is_shown_by_a_test(framework: str) -> None:
    """`test_documents` checks that it exists."""
    cases = {question: cell for question, cell in cells()[framework].items() if cell != "-"}
    assert shown()[framework] == cases


def test_every_section_is_in_the_matrix() -> None:
    assert list(shown()) == list(cells())
    assert len(cells()) == 12
