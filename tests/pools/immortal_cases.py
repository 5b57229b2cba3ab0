"""Cases of `dpex.pools.local.immortal`, for interpreters that have NumPy but neither torch nor pytest.

The program prints the error of each case as JSON. Each case runs in a forked process, whose objects it changes.
"""

import ctypes
import gc
import json
import os
import sys
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpex.pools.local.immortal import share_plain_objects


class Rows:
    """A dataset with some attributes."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Names(list[str]):
    """A list whose class may do anything."""


def rows(count: int = 10_000) -> list[Any]:
    return [
        {"path": f"/data/{n}.jpg", "label": n + 1000, "box": (n + 0.5, n - 0.5), "tags": {str(n)}} for n in range(count)
    ]


def is_immortal(one: Any) -> bool:
    return bool(ctypes.c_uint32.from_address(id(one)).value >> 31)


def private_bytes() -> int:
    lines = Path("/proc/self/smaps_rollup").read_text(encoding="ascii").splitlines()
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def reads_copy_nothing() -> None:
    """Of 100 MB of objects a worker that reads all of them copies less than a tenth."""
    dataset = Rows(rows=rows(150_000))
    gc.freeze()
    assert share_plain_objects(dataset) == ""
    if pid := os.fork():
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        return
    before = private_bytes()
    for row in dataset.rows:
        len(row["path"]) + row["label"] + sum(row["box"]) + len(row["tags"])
    os._exit(private_bytes() - before > 10 << 20)


def plain_objects_are_found_in_datasets_of_datasets() -> None:
    inner = Rows(rows=rows(10), names=Names(["one"]))
    share_plain_objects(Rows(dataset=Rows(datasets=[inner, Rows(more=[b"bytes", 1e9])])))
    assert all(is_immortal(one) for row in inner.rows for one in (row, *row.values(), row["box"][0]))
    assert is_immortal(inner.rows)
    assert not is_immortal(inner)
    assert not is_immortal(inner.names)


def containers_of_other_objects_stay_mortal() -> None:
    file = tempfile.TemporaryFile()  # noqa: SIM115
    ended = []
    weakref.finalize(file, ended.append, True)
    dataset = Rows(rows=[[{"file": file, "name": "a name"}], [{"name": "another name"}]])
    share_plain_objects(dataset)
    with_file, without = dataset.rows
    assert [is_immortal(one) for one in (dataset.rows, with_file, with_file[0], without, without[0])] == [0, 0, 0, 1, 1]
    assert is_immortal(with_file[0]["name"])
    del file, with_file
    dataset.rows.pop(0)
    assert ended == [True]


def containers_in_a_circle() -> None:
    plain: list[Any] = ["plain"]
    plain.append({"back": plain})
    other: list[Any] = ["other"]
    other.append({"back": [other, Rows()]})
    share_plain_objects([plain, other])
    assert [is_immortal(one) for one in (plain, plain[1], other, other[1], other[1]["back"])] == [1, 1, 0, 0, 0]


def many_objects_of_classes_are_not_all_searched() -> None:
    dataset = Rows(objects=[Rows(n=str(n) * 3) for n in range(30_000)], rows=rows(5))
    share_plain_objects(dataset)
    assert sum(is_immortal(one.n) for one in dataset.objects) == 10_000
    assert is_immortal(dataset.rows[0])


def a_worker_may_change_what_it_shares() -> None:
    dataset = Rows(rows=rows(2000))
    share_plain_objects(dataset)
    for row in dataset.rows:
        row["label"] += 1
        del row["path"]
        row["tags"].add("new")
    dataset.rows.reverse()
    dataset.rows += [{"label": 5}]
    assert [row["label"] for row in dataset.rows[:2]] == [3000, 2999]
    del dataset.rows[100:]
    gc.collect()
    assert json.loads(json.dumps(dataset.rows[0]["box"])) == [1999.5, 1998.5]


CASES: dict[str, Callable[[], None]] = {
    case.__name__: case
    for case in (
        reads_copy_nothing,
        plain_objects_are_found_in_datasets_of_datasets,
        containers_of_other_objects_stay_mortal,
        containers_in_a_circle,
        many_objects_of_classes_are_not_all_searched,
        a_worker_may_change_what_it_shares,
    )
}


def error_of(case: Callable[[], None]) -> str:
    """Run a case in a forked process that ends as a program does; return its error."""
    reader, writer = os.pipe()
    if not (pid := os.fork()):
        try:
            case()
        except BaseException as error:
            line = error.__traceback__ and error.__traceback__.tb_next and error.__traceback__.tb_next.tb_lineno
            os.write(writer, f"line {line}: {error!r}".encode())
        os.close(writer)
        sys.exit(0)
    os.close(writer)
    with os.fdopen(reader) as told:
        error = told.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return error or (f"exit code {code}" if code else "")


if __name__ == "__main__":
    print(json.dumps({name: error_of(case) for name, case in CASES.items()}))
