"""Every public name can be had from `dpex`, is the one that its home module defines, and is documented."""

from __future__ import annotations

import importlib
import inspect
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
from torch.utils.data import DataLoader

import dpex
from dpex import errors, stats
from dpex.dataloader import DpexDataLoader

ROOT = Path(__file__).parents[1]
NAMES = dpex.__all__


def test_the_names() -> None:
    assert len(set(NAMES)) == len(NAMES)
    assert sorted(NAMES) == list(NAMES)
    assert set(NAMES) == set(dpex._HOME)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_what_its_home_defines(name: str) -> None:
    value = getattr(dpex, name)
    home = importlib.import_module(dpex._HOME[name])
    assert value is getattr(home, name)
    assert (value.__module__, value.__name__) == (home.__name__, name)


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_documented_and_listed(name: str) -> None:
    assert inspect.getdoc(getattr(dpex, name))
    assert name in dir(dpex)


def test_type_checkers_see_the_same_names() -> None:
    """The lazy names are repeated under TYPE_CHECKING; one that is missing there is `Any` to everybody's mypy."""
    source = Path(dpex.__file__).read_text()
    block = source.partition("if TYPE_CHECKING:")[2].partition("__version__")[0]
    assert {n for n in re.findall(r"\w+", block) if n in NAMES} == set(NAMES)


@pytest.mark.parametrize("module", [errors, stats], ids=lambda module: module.__name__)
def test_every_error_and_every_value_is_public(module: object) -> None:
    defined = {
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and value.__module__ == module.__name__ and not name.startswith("_")  # type: ignore[attr-defined]
        if issubclass(value, Exception) or is_dataclass(value)
    }
    assert defined
    assert defined <= set(NAMES)


def hints_of(value: Any) -> Iterator[Any]:
    """The annotations that a user of a public class or function meets."""
    if inspect.isfunction(value):
        yield from get_type_hints(value, localns=vars_of_dpex()).values()
        return
    if is_dataclass(value):
        yield from get_type_hints(value).values()
    owners = (value,) if is_dataclass(value) else value.__mro__
    members = [one for owner in owners if owner.__module__.startswith("dpex.") for one in vars(owner).items()]
    for name, member in members:
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if inspect.isfunction(function) and (name == "__init__" or not name.startswith("_")):
            yield from hints_of(function)


def vars_of_dpex() -> dict[str, Any]:
    """The public names, which modules may import for type checkers alone."""
    return {name: getattr(dpex, name) for name in NAMES}


def classes_in(hint: Any) -> Iterator[type]:
    """Those of dpex's own in an annotation, such as `Decision` in ``list[Decision] | None``."""
    if inspect.isclass(hint) and hint.__module__.startswith("dpex."):
        yield hint
    for inner in hint if isinstance(hint, list) else get_args(hint):
        yield from classes_in(inner)


def test_the_reader_of_annotations_sees_what_it_should() -> None:
    assert set(classes_in(list[dpex.Decision] | Callable[[dpex.Spans], None] | Mapping[str, int])) == {
        dpex.Decision,
        dpex.Spans,
    }
    assert dpex.Diagnosis in {found for hint in hints_of(DpexDataLoader) for found in classes_in(hint)}
    assert dpex.Settings in {found for hint in hints_of(dpex.Decision) for found in classes_in(hint)}
    assert dpex.Prediction in {found for hint in hints_of(dpex.Diagnosis) for found in classes_in(hint)}


@pytest.mark.parametrize("name", NAMES)
def test_types_that_a_public_name_returns_or_takes_are_public(name: str) -> None:
    found = {kind for hint in hints_of(getattr(dpex, name)) for kind in classes_in(hint)}
    assert {kind.__name__ for kind in found} <= set(NAMES)


def test_the_error_tree_is_drawn_as_it_is() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+)\((\w+)\)", errors.__doc__ or ""))
    real = {
        name: value.__bases__[1].__name__
        for name, value in vars(errors).items()
        if inspect.isclass(value) and value.__bases__[0] is errors.DpexError
    }
    assert drawn == real


def test_the_loader_is_torchs() -> None:
    assert dpex.DpexDataLoader is DpexDataLoader
    assert issubclass(DpexDataLoader, DataLoader)


def test_the_loader_takes_torchs_arguments_in_torchs_order() -> None:
    theirs = [p for p in inspect.signature(DataLoader).parameters.values() if p.name != "in_order"]
    ours = inspect.signature(DpexDataLoader).parameters
    assert list(ours)[: len(theirs)] == [p.name for p in theirs]
    assert {p.name: p.kind for p in theirs} == {p.name: ours[p.name].kind for p in theirs}
    assert {p.name: p.default for p in theirs} == {p.name: ours[p.name].default for p in theirs}


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match=r"module 'dpex' has no attribute 'DataLoader'"):
        _ = dpex.DataLoader


def test_star_import_and_first_use_in_a_new_process() -> None:
    code = f"from dpex import *; from dpex.dataloader import DpexDataLoader as D; assert D is DpexDataLoader; {NAMES}"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)


def test_the_version_is_the_projects() -> None:
    project = re.search(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert project is not None
    assert dpex.__version__ == project[1]
