"""The check of dpex's structure finds what it is for. `make lint` runs it on dpex itself."""

import pytest

from tests.structure import MOST_LINES, faults

LONG = "dpex.pools.long"
SOUND = {
    "dpex": "",
    "dpex.a": "from dpex import b\n",
    "dpex.b": "import dpex.c\n",
    "dpex.c": "",
    LONG: "\n" * (MOST_LINES + 1),
}


def faults_with(**changed: str) -> list[str]:
    sources = SOUND | {f"dpex.{name}": source for name, source in changed.items()}
    return list(faults(sources, [LONG]))


def test_sound_modules_have_no_fault() -> None:
    assert faults_with(c="\n" * MOST_LINES) == []


@pytest.mark.parametrize(
    "back",
    [
        "import dpex.a\n",
        "from dpex.a import thing\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from dpex.a import Thing\n",
        "def function():\n    from dpex import a\n",
    ],
    ids=["module", "name", "type", "in a function"],
)
def test_a_circle_of_imports_is_a_fault(back: str) -> None:
    (fault,) = faults_with(c=back)
    _, _, path = fault.partition(": ")
    first, *others = path.split(" -> ")
    assert {first, *others} == {"dpex.a", "dpex.b", "dpex.c"}
    assert others[-1] == first


def test_a_module_of_451_lines_is_a_fault() -> None:
    assert faults_with(c="\n" * 451) == ["dpex.c has 451 lines, but a module has at most 450"]


def test_an_exception_that_is_not_needed_is_a_fault() -> None:
    (fault,) = faults(SOUND | {LONG: "\n" * MOST_LINES}, [LONG])
    assert fault == "dpex.pools.long has 450 lines and needs no exception: remove it from LONG"


def test_only_folders_to_be_redesigned_have_exceptions() -> None:
    (fault,) = faults(SOUND | {"dpex.c": "\n" * 451}, [LONG, "dpex.c"])
    assert fault.startswith("dpex.c may not be an exception")
