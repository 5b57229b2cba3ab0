"""The part of a dataset that is unpickled once for all workers: what belongs to it, and what comes out at the end."""

import collections
import copyreg
import datetime
import decimal
import io
import pathlib
import pickle
from typing import Any, NamedTuple

import numpy as np
import pytest

from dpex.pools.local.plain_part import Joining, PlainPart
from dpex.transport.pickling import with_persistent_id


class Dataset:
    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Text(str):
    pass


class Point(NamedTuple):
    rows: list[int]


class Zone(datetime.tzinfo):
    pass


class Reduced:
    """The arguments of its constructor are new objects, which go once they are pickled."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return Reduced, ([self.value[0], list(self.value[1])],)


def divided(value: Any) -> tuple[bytes, list[Any]]:
    """Return the pickle of a value without its plain part, and that."""
    part, stream = PlainPart(), io.BytesIO()
    with_persistent_id(pickle.Pickler, part.place_of)(stream).dump(value)
    return stream.getvalue(), part.objects


def joined(rest: bytes, objects: list[Any]) -> Any:
    """Unpickle both parts, as a worker does."""
    return Joining(io.BytesIO(rest), pickle.loads(pickle.dumps(objects))).load()


def globals_of(data: bytes) -> set[str]:
    """Return the modules of all classes and functions that a pickle names."""
    found = set()

    class Noting(pickle.Unpickler):
        def find_class(self, module: str, name: str) -> Any:
            found.add(module)
            return super().find_class(module, name)

    Noting(io.BytesIO(data)).load()
    return found


PLAIN = [
    [{"path": "a", "box": (1, 2.5)}, {"path": "b", "box": None}],
    {1: {2, 3}, "x": frozenset((b"y",)), "y": [True, 2j]},
    [np.arange(3), np.array(["a"]), np.array(0, "M8[s]"), np.float32(0.5), np.str_("b")],
    [datetime.date(2026, 1, 2), datetime.datetime(2026, 1, 2, tzinfo=datetime.timezone.utc), datetime.timedelta(1)],
    [decimal.Decimal("1.5"), pathlib.Path("/a/b"), bytearray(b"c")],
]


@pytest.mark.parametrize("value", PLAIN)
def test_plain_containers_are_taken_out(value: Any) -> None:
    rest, objects = divided(Dataset(value=value, other=len))
    assert any(one is value for one in objects)
    made = joined(rest, objects).value
    assert repr(made) == repr(value)
    assert len(rest) < 150


OTHERS = [
    Text("a text"),
    Point([1]),
    Dataset(x=1),
    len,
    Dataset,
    datetime.datetime(2026, 1, 2, tzinfo=Zone()),
    np.array([Text("a text")], dtype=object),
    np.zeros(1, dtype=[("x", "i4")]),
    np.zeros(1, np.dtype("i4", metadata={"key": "value"})),
    collections.OrderedDict(a=1),
    collections.defaultdict(list),
]


@pytest.mark.filterwarnings("ignore:.*metadata:UserWarning")
@pytest.mark.parametrize("other", OTHERS, ids=lambda one: type(one).__name__)
def test_containers_of_other_objects_stay(other: Any) -> None:
    value = [["plain"], {"key": [other]}]
    rest, objects = divided(Dataset(value=value))
    assert not any(one is value or one is value[1] for one in objects)
    assert any(one is value[0] for one in objects)
    made = joined(rest, objects).value
    assert made[0] == ["plain"]
    assert type(made[1]["key"][0]) is type(other)


def test_plain_part_names_no_code_of_users() -> None:
    data = Dataset(plain=PLAIN, others=[[one, ["plain"]] for one in OTHERS])
    _, objects = divided(data)
    modules = globals_of(pickle.dumps(objects))
    known = {"builtins", "datetime", "decimal", "pathlib", "numpy", "_codecs"}
    assert {name.split(".")[0] for name in modules} <= known


def test_one_object_stays_one_object() -> None:
    rows = [{"n": n, "tags": ["x"]} for n in range(3)]
    loop: list[Any] = [rows]
    loop.append(loop)
    array, large = np.arange(3), "x" * 10_000
    data = Dataset(first=rows[0], rows=rows, tags=rows[0]["tags"], mixed=[rows[1], len], loop=loop, both=[array, len])
    data.array, data.owner, data.large = array, [data, rows[2]], [large, len, large]
    made = joined(*divided(data))
    assert made.first is made.rows[0]
    assert made.tags is made.rows[0]["tags"]
    assert made.mixed[0] is made.rows[1]
    assert made.loop[1] is made.loop
    assert made.loop[0] is made.rows
    assert made.both[0] is made.array
    assert made.owner[0] is made
    assert made.owner[1] is made.rows[2]
    assert made.large[0] is made.large[2]
    made.first["n"] = "changed"
    assert made.rows[0]["n"] == "changed"


def test_arguments_of_constructors_are_not_mixed_up() -> None:
    data = [Reduced([n, [n]]) for n in range(3000)]
    made = joined(*divided(data))
    assert [one.value for one in made] == [[n, [n]] for n in range(3000)]


def test_types_with_a_reducer_of_their_own_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(copyreg.dispatch_table, np.ndarray, lambda array: (Text, ("made by a reducer",)))
    data = Dataset(array=np.arange(3), rows=[np.arange(3)])
    made = joined(*divided(data))
    assert made.array == "made by a reducer"
    assert made.rows == ["made by a reducer"]
