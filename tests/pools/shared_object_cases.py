"""Cases of `dpex.pools.local.shared_objects`, for an interpreter that has NumPy and neither torch nor pytest.

Run as a program, it prints the error of each case ("": none) as JSON. Each case runs in a process of its own, which
plays the fork server; `in_worker` forks a worker from it.
"""

import collections
import copy
import ctypes
import datetime
import gc
import json
import os
import pickle
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from dpex.pools.local import shared_objects
from dpex.pools.local.shared_objects import ObjectSearch, why_unsupported
from dpex.schedule.events import SharedObjects

CASES: dict[str, Callable[[], None]] = {}


def case(function: Callable[[], None]) -> Callable[[], None]:
    CASES[function.__name__] = function
    return function


def in_process(function: Callable[[], object]) -> str:
    """Run a function in a forked process; return its traceback, or "" if there was none."""
    reading, writing = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(reading)
        try:
            function()
            told = b""
        except BaseException:
            told = traceback.format_exc().encode()
        os.write(writing, told)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        told = pipe.read()
    _, status = os.waitpid(pid, 0)
    return told.decode() or (f"the process ended with status {status}" if status else "")


def in_worker(function: Callable[[], object]) -> None:
    error = in_process(function)
    assert not error, error


def share(root: Any) -> SharedObjects:
    assert why_unsupported() == ""
    gc.freeze()
    search = ObjectSearch(root)
    assert search.advance(float("inf"))
    return search.share()


def is_immortal(one: Any) -> bool:
    before = sys.getrefcount(one)
    more = [one] * 3
    return len(more) == 3 and sys.getrefcount(one) == before


def private_bytes() -> int:
    rollup = Path("/proc/self/smaps_rollup").read_text()
    return sum(int(line.split()[1]) << 10 for line in rollup.splitlines() if line.startswith("Private_Dirty"))


def rows(count: int) -> list[dict[str, Any]]:
    return [{"path": f"/data/{n:09d}.jpg", "label": n + 1000, "box": (n + 0.5, n + 1.5)} for n in range(count)]


class Dataset:
    def __init__(self, items: Any) -> None:
        self.items = items


class Closing:
    def __init__(self, closed: list[int]) -> None:
        self.closed = closed

    def __del__(self) -> None:
        self.closed.append(1)


class Slotted:
    __slots__ = ("name", "next")

    def __init__(self, name: str) -> None:
        self.name, self.next = name, self


class Text(str):
    pass


class Point(NamedTuple):
    name: str
    values: list[float]


class Meta(type):
    """Has code in each place that a search might call."""

    def __hash__(cls) -> int:
        raise AssertionError("the search called code of a metaclass")

    def __instancecheck__(cls, one: object) -> bool:
        raise AssertionError("the search called code of a metaclass")

    def __getattribute__(cls, name: str) -> Any:
        raise AssertionError("the search called code of a metaclass")


class Guarded(list, metaclass=Meta):  # type: ignore[type-arg]
    """Has code in each place that a search might call."""

    def __iter__(self) -> Iterator[Any]:
        raise AssertionError("the search called code of a dataset")

    __len__ = __getitem__ = __getattribute__ = __hash__ = __iter__  # type: ignore[assignment]


@case
def reads_copy_no_memory() -> None:
    data = Dataset(rows(50_000))
    found = share(data)
    assert found.why_not == ""
    assert found.objects > 50_000 * 6, found

    def read() -> None:
        before = private_bytes()
        total = sum(len(row["path"]) + row["label"] + sum(row["box"]) for row in data.items)
        assert total
        copied = private_bytes() - before
        assert copied < found.nbytes // 10, (copied, found)

    in_worker(read)


@case
def a_changed_dataset_is_as_without() -> None:
    data, other = Dataset(rows(500)), Dataset(rows(500))
    share(data)

    def change(one: Dataset) -> Any:
        one.items[3]["path"] = "new"
        one.items[4].update({str(n): [n] for n in range(100)})
        del one.items[5]
        del one.items[6]["label"]
        one.items.append({"path": "last"})
        one.items[7]["box"] += (3,)
        one.items[8]["path"] += "x"
        one.items.sort(key=lambda row: row["path"])
        one.items[10:400] = one.items[300:310]
        return one.items

    def compare() -> None:
        assert change(data) == change(other)
        gc.collect()
        gc.unfreeze()
        gc.collect()
        assert data.items == other.items
        data.items.clear()
        data.__dict__.clear()
        gc.collect()

    in_worker(compare)


@case
def cycles_are_searched_once() -> None:
    loop: list[Any] = ["a loop", {}]
    loop.append(loop)
    loop[1]["back"] = loop
    data = Dataset(loop)
    loop[1]["owner"] = data
    assert share(data).objects >= 3
    assert is_immortal(loop)
    assert is_immortal(loop[1])
    assert not is_immortal(data)
    in_worker(lambda: (loop.clear(), gc.unfreeze(), gc.collect()))


@case
def a_subclass_of_a_plain_type_stays_mortal() -> None:
    text, table = Text("a text with attributes"), collections.defaultdict(list, {"a": [1000]})
    text.other = ["an attribute"]  # type: ignore[attr-defined]
    queue, ordered = collections.deque(["queued text"]), collections.OrderedDict(a="ordered text")
    share([text, table, queue, ordered])
    assert not any(map(is_immortal, (text, table, queue, ordered)))
    inner = (text.other, text.other[0], table["a"], queue[0], ordered["a"])  # type: ignore[attr-defined]
    assert all(map(is_immortal, inner))
    in_worker(lambda: table["b"].append(table.pop("a")))


@case
def slots_and_values_are_shared() -> None:
    one, point = Slotted(" ".join(["slot"])), Point(" ".join(["a", "b"]), [0.25])
    day, number = datetime.datetime(2026, 1, 2), np.float32(0.25)
    data = [one, point, day, number]
    share(data)
    assert all(map(is_immortal, (*data, one.name, point.values, data)))

    def change() -> None:
        one.next, one.name = None, "other"  # type: ignore[assignment]
        assert point._replace(name="c") == Point("c", [0.25])
        assert day + datetime.timedelta(1) > day

    in_worker(change)


@case
def interned_strings_stay_interned() -> None:
    plain, interned = "-".join(["a", "b"]), sys.intern("-".join(["c", "d"]))
    share([plain, interned, {plain: 1000}])

    def intern() -> None:
        assert sys.intern("-".join(["c", "d"])) is interned
        assert sys.intern(plain) is sys.intern("-".join(["a", "b"]))
        assert getattr(Slotted("x"), sys.intern("-".join(["na", "me"])).replace("-", "")) == "x"

    in_worker(intern)


@case
def a_dropped_container_runs_finalizers() -> None:
    closed: list[int] = []
    data = Dataset([[{"file": Closing(closed)}] for _ in range(3)])
    texts = [[f"text {n}"] for n in range(3)]
    share([data, [texts]])
    assert is_immortal(texts)
    assert is_immortal(texts[0])
    assert not is_immortal(data.items)

    def drop() -> None:
        del data.items[0]
        assert len(closed) == 1
        data.items = None
        assert len(closed) == 3

    in_worker(drop)


@case
def attributes_of_a_dropped_instance_run_finalizers() -> None:
    closed: list[int] = []
    data = [Dataset([Closing(closed)]), Dataset([1000])]
    attributes = [vars(one) for one in data]
    share([attributes, data, [[1001]]])
    assert not is_immortal(attributes[0])

    def drop() -> None:
        data.clear()
        attributes.clear()
        assert closed

    in_worker(drop)


@case
def a_shared_container_of_a_file_is_mortal() -> None:
    closed: list[int] = []
    common = [Closing(closed)]
    data = Dataset([[common, "first"], [common, "second"], ["third"]])
    share([data, common])
    assert [is_immortal(one) for one in data.items] == [False] * 3  # they are found together
    del common

    def drop() -> None:
        data.items = None
        assert closed

    in_worker(drop)


@case
def weak_references_run_their_callbacks() -> None:
    called: list[str] = []
    data = Dataset([{1000, 1001}, {"instance": Dataset([1002])}])
    kept = [
        weakref.ref(data.items[0], lambda _: called.append("set")),
        weakref.ref(data.items[1]["instance"], lambda _: called.append("instance")),
    ]
    share(data)

    def drop() -> None:
        data.items.pop(0)
        assert called == ["set"]
        data.items = None
        assert called == ["set", "instance"], kept

    in_worker(drop)


@case
def a_large_list_is_searched_in_slices() -> None:
    ticks = iter(range(1000))
    data = [float(n) for n in range(1_000_000)]
    gc.freeze()
    search = ObjectSearch(data, clock=lambda: float(next(ticks)))
    assert not search.advance(8.0)
    assert not search.is_complete
    found = search.share()
    assert 0 < found.objects <= 8 << 14, found
    assert is_immortal(data[0])
    assert not is_immortal(data[-1])
    assert not is_immortal(data)


@case
def code_of_users_is_not_called() -> None:
    guarded = Guarded([f"text {n}" for n in range(100_000)])
    few = Guarded(["few"])
    share([guarded, few])
    assert all(map(is_immortal, list.__getitem__(guarded, slice(None))))
    assert is_immortal(list.__getitem__(few, 0))


@case
def copies_and_pickles_are_equal() -> None:
    data, other = rows(300), rows(300)
    share(data)

    def compare() -> None:
        for one in (copy.copy(data), copy.deepcopy(data), pickle.loads(pickle.dumps(data)), list(data), data[:]):
            assert one == data == other
        assert not is_immortal(copy.deepcopy(data)[0])
        assert hash(data[0]["box"]) == hash(other[0]["box"])
        assert data != [*data, {}]
        assert {row["path"] for row in data} == {row["path"] for row in other}
        assert json.dumps(data) == json.dumps(other)
        assert repr(data) == repr(other)

    in_worker(compare)


@case
def a_dataset_may_fork_itself() -> None:
    data = rows(30_000)
    first = share(data)

    def fork() -> None:
        in_worker(lambda: data.clear())
        again = share([data, rows(100)])  # a fork server of its own
        assert again.objects < first.objects // 10, again
        in_worker(lambda: data[7].clear())
        assert len(data) == 30_000

    in_worker(fork)


@case
def extensions_of_the_old_stable_abi_may_count() -> None:
    data = ["counted " * 2, ["in 64 bits"]]
    share(data)

    def count() -> None:
        for one in (data, *data):
            before = sys.getrefcount(one)
            word = ctypes.c_int64.from_address(id(one))
            for change in (1, 1, -1, -1, -1, 1):  # Py_INCREF and Py_DECREF of Python 3.11, inlined
                word.value += change
                held = [one] * 5
                del held
                assert one == copy.copy(one)
            assert word.value > 1000
            assert sys.getrefcount(one) > 1000, before

    in_worker(count)


@case
def an_abandoned_search_restores_counts() -> None:
    data = rows(2_000)
    held = [data, *data, *(row["box"] for row in data)]
    before = [sys.getrefcount(one) for one in held]
    search = ObjectSearch(data)
    search.advance(0.0)
    while not search.advance(1e-9) and search.seconds < 0.001:
        pass
    search.abandon()
    del search
    assert [sys.getrefcount(one) for one in held] == before


@case
def few_objects_are_not_shared() -> None:
    least, shared_objects.LEAST_BYTES = shared_objects.LEAST_BYTES, 1 << 20
    data = rows(100)
    before = sys.getrefcount(data)
    found = share(data)
    shared_objects.LEAST_BYTES = least
    assert found.objects == 0
    assert "too few objects" in found.why_not
    assert sys.getrefcount(data) == before


@case
def arrays_of_objects_are_searched() -> None:
    small = np.array(["a text", ["a list"], None], dtype=object)
    large = np.array([f"text {n}" for n in range(100_000)], dtype=object).reshape(-1, 10).T
    numbers = [np.arange(3) for _ in range(3)]
    share({"small": small, "large": large, "numbers": numbers})
    assert is_immortal(small[0])
    assert is_immortal(small[1])
    assert all(map(is_immortal, large.flat))
    assert not is_immortal(small)
    assert not is_immortal(numbers[0])


def end_with_shared_objects() -> None:
    """End this process as a program does, which frees all objects."""
    share([rows(1_000), sys.intern("-".join(["kept", "at the end"])), sys.modules])


def main() -> None:
    shared_objects.LEAST_BYTES = 0
    if sys.argv[1:] == ["end"]:
        end_with_shared_objects()
        return
    print(json.dumps({name: in_process(function) for name, function in CASES.items()}))


if __name__ == "__main__":
    main()
