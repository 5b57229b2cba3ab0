"""Every knob refuses what it cannot work with, by name, value and remedy."""

from dataclasses import fields
from typing import Any

import pytest

from dpex.autotune.config import AutotuneConfig
from dpex.errors import OptionError

NAMES = [field.name for field in fields(AutotuneConfig)]
NONSENSE = [
    *((name, value) for name in NAMES for value in (-1, float("nan"), True, [1])),
    *((name, "" if name in ("trace", "start") else "4") for name in NAMES),
]


@pytest.mark.parametrize(("name", "value"), NONSENSE, ids=repr)
def test_nonsense_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=name) as error:
        AutotuneConfig(**{name: value})
    assert repr(value) in str(error.value)
    assert "give a" in str(error.value)


def test_the_least_may_not_be_above_the_most() -> None:
    with pytest.raises(OptionError, match="min_local=3, max_local=2"):
        AutotuneConfig(min_local=3, max_local=2)
    assert AutotuneConfig(min_remote=2, max_remote=2).max_remote == 2


def test_every_knob_is_documented() -> None:
    assert AutotuneConfig.__doc__ is not None
    for field in fields(AutotuneConfig):
        assert field.name in AutotuneConfig.__doc__
