"""The warning that workers copy the objects of the dataset."""

from typing import Any

import pytest

from dpex.diagnose.copies import LEAST_BYTES, HeldObjects, warning
from dpex.loader.held_objects import largest_container

HELD = HeldObjects(text="`rows`: a list of 2,100,000 dict", nbytes=3 * LEAST_BYTES)


class Data:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


def test_largest_attribute_is_described() -> None:
    rows = [{"path": f"{n:050d}", "label": n} for n in range(1000)]
    found = largest_container(Data(rows=rows, few=[1, 2], text="x" * 10**7))
    assert found.text == "`rows`: a list of 1,000 dict"
    assert 300_000 < found.nbytes < 600_000


@pytest.mark.parametrize(
    ("dataset", "text"),
    [
        ([["a", "b"]] * 3, "`dataset`: a list of 3 list"),
        (Data(dataset=Data(places={"a": 1})), "`places`: a dict of 1 int"),
        (Data(names=("a",)), "`names`: a tuple of 1 str"),
        (Data(rows=[]), ""),
        (range(5), ""),
    ],
)
def test_other_datasets(dataset: Any, text: str) -> None:
    assert largest_container(dataset).text == text


def test_dataset_that_holds_itself() -> None:
    data, loop = Data(rows=["a"]), []  # type: ignore[var-annotated]
    data.dataset = data  # type: ignore[attr-defined]
    loop.append(loop)
    data.rows = loop  # type: ignore[attr-defined]
    assert largest_container(data).text == "`rows`: a list of 1 list"


def test_warning_names_workers_bytes_and_objects() -> None:
    told = warning(HELD, 8, 2 * LEAST_BYTES)
    assert told.startswith(
        "each of 8 workers has copied 134 MB of the dataset's objects (`rows`: a list of 2,100,000 dict)"
    )
    assert "dpex.compact" in told


@pytest.mark.parametrize(("workers", "private"), [(0, 2 * LEAST_BYTES), (8, LEAST_BYTES - 1), (8, 0.0)])
def test_no_warning_without_copies(workers: int, private: float) -> None:
    assert warning(HELD, workers, private) == ""
