"""Each constant of the controller says what it means, in what unit and range, and why it has its value."""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest

from dpex.autotune import controller
from dpex.autotune.constants.groups import PARTS, described, group_of

FOLDER = Path(controller.__file__).parent
UNITS = {
    *("share", "ratio", "seconds", "bytes", "bytes/s", "batches", "windows", "workers", "settings", "changes"),
    "standard errors",
}
NUMERIC = {"config", "checked", "types", "wording", "replay", "forecast"}
"""Modules whose numbers are ranges, formats and choices of other parts."""


@pytest.mark.parametrize("name", described())
def test_a_constant_is_described(name: str) -> None:
    constant = described()[name]
    assert constant.unit in UNITS
    assert constant.low <= constant.value <= constant.high
    assert constant.low < constant.high
    for sentence in (constant.meaning, constant.why):
        assert not sentence[0].islower()
        assert sentence.endswith(".")
        assert "|" not in sentence, "it stands in a table"
    assert constant.off != constant.value


def test_a_share_is_a_share() -> None:
    for constant in described().values():
        if constant.unit == "share":
            assert 0.0 <= constant.low <= constant.high <= 1.0, constant.name


def test_groups_have_names_of_their_own() -> None:
    groups = [group for part in PARTS.values() for group in part]
    assert len({group.group() for group in groups}) == len(groups)
    assert all(group_of(f"{group.group()}.x") is group for group in groups)
    assert all((type(group).__doc__ or "").endswith(".") for group in groups)


@pytest.mark.parametrize("path", [*FOLDER.glob("*.py"), *FOLDER.glob("policies/*.py")], ids=lambda path: path.stem)
def test_no_number_of_a_module_is_without_a_word(path: Path) -> None:
    """Numbers that stay in a module are not for tuning, and say below what they are."""
    if path.stem in NUMERIC:
        return
    body = ast.parse(path.read_text()).body
    for statement, after in zip(body, [*body[1:], ast.Pass()], strict=True):
        if isinstance(statement, ast.Assign) and _is_number(statement.value):
            names = [target.id for target in statement.targets if isinstance(target, ast.Name)]
            assert isinstance(after, ast.Expr), (path.name, names)


def _is_number(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) and not math.isnan(node.value)
