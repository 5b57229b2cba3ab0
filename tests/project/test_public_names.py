"""Every public name can be imported from `dpex`, is the one that its home module defines, and is documented."""

from __future__ import annotations

import importlib
import inspect
import pickle
import re
import subprocess
import sys
from dataclasses import is_dataclass
from pathlib import Path

import pytest

import dpex
from dpex import errors, stats
from dpex.errors import DpexError

ROOT = Path(__file__).parents[2]
NAMES = dpex.__all__


@pytest.mark.parametrize("name", NAMES)
def test_each_name_is_what_its_home_defines_and_is_documented(name: str) -> None:
    value = getattr(dpex, name)
    home = importlib.import_module(dpex._HOME[name])
    assert value is getattr(home, name)
    assert (value.__module__, value.__name__) == (home.__name__, name)
    assert inspect.getdoc(value)
    assert name in dir(dpex)


def test_type_checkers_see_the_same_names() -> None:
    """The lazy names are repeated under TYPE_CHECKING; one that is missing there is `Any` to everybody's mypy."""
    source = Path(dpex.__file__).read_text()
    block = source.partition("if TYPE_CHECKING:")[2].partition("__version__")[0]
    assert sorted({name for name in re.findall(r"\w+", block) if name in NAMES}) == list(NAMES)


@pytest.mark.parametrize("module", [errors, stats], ids=lambda module: module.__name__)
def test_every_error_and_every_value_of_stats_is_public(module: object) -> None:
    classes = {name: value for name, value in vars(module).items() if inspect.isclass(value)}
    own = {name: value for name, value in classes.items() if value.__module__ == module.__name__}  # type: ignore[attr-defined]
    public = {name for name, value in own.items() if issubclass(value, Exception) or is_dataclass(value)}
    assert public
    assert {name for name in public if not name.startswith("_")} <= set(NAMES)


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


PUBLIC = [value for value in vars(errors).values() if inspect.isclass(value)]


@pytest.mark.parametrize("error", PUBLIC)
def test_a_public_error_is_a_dpex_error_and_a_built_in_one(error: type[Exception]) -> None:
    assert issubclass(error, DpexError)
    assert [base.__module__ for base in error.__bases__ if base is not DpexError] == ["builtins"]


@pytest.mark.parametrize("error", PUBLIC)
def test_a_public_error_travels_between_processes(error: type[Exception]) -> None:
    again = pickle.loads(pickle.dumps(error("value=3: give 4")))
    assert (type(again), str(again)) == (error, "value=3: give 4")


def test_the_tree_in_the_documentation_is_that_of_the_classes() -> None:
    drawn = dict(re.findall(r"[├└]── (\w+)\((\w+)\)", errors.__doc__ or ""))
    assert drawn == {error.__name__: error.__bases__[1].__name__ for error in PUBLIC if error is not DpexError}
