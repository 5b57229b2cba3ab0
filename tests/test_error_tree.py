"""A public error is a `DpexError`, and also the built-in error that code written for torch catches."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from dpex import errors
from dpex.errors import DpexError

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
