"""Records of counts whose declarations define how they add up. PURE.

A record is a frozen dataclass whose fields are declared with `counter`, `level`, `state`, `histogram`, `by_name` or
`few_of_many`. The declaration has the meaning, the unit, the stage of a batch and the exported metric. Declarations
determine the sum of two records (`Record.plus`, `Record.then`), the counts since an earlier record (`Record.since`), a
smaller value with some of the fields (`Record.narrowed`), and the fields of a trace (`Record.traced`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache
from itertools import zip_longest
from typing import Any, Literal, NamedTuple, TypeVar

Unit = Literal["", "seconds", "bytes", "ratio", "batches_per_second"]
"""Units of fields. "" is the unit of a count. The field's name tells what is counted."""
_R = TypeVar("_R", bound="Record")
_T = TypeVar("_T")
_DECLARED = "declared"


class Rule(NamedTuple):
    """The functions that join two values of a field.

    ``plus(one, other)`` joins values of the same time, ``then(earlier, later)`` adds values of consecutive times, and
    ``since(later, earlier)`` returns the change.
    """

    plus: Callable[[Any, Any], Any]
    then: Callable[[Any, Any], Any]
    since: Callable[[Any, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Quantity:
    """The declaration of a field.

    ``stage``: The stage of a batch that the field measures, or "".
    ``metric``: The exported name, or "".
    ``how_to_read``: The meaning of the metric's values to the user.
    ``label``: The value of the metric's last label if several fields share a metric; by default the stage.
    ``buckets``, ``total``: The finite upper bounds of a histogram, and the attribute with the sum of the observations.
    ``is_traced``: True if a trace holds the field, because a policy may read it.
    """

    rule: Rule
    help: str
    unit: Unit = ""
    stage: str = ""
    metric: str = ""
    how_to_read: str = ""
    label: str = ""
    buckets: tuple[float, ...] = ()
    total: str = ""
    is_traced: bool = True


@dataclass(frozen=True, kw_only=True)
class Record:
    """See the module."""

    @classmethod
    def declared(cls) -> Mapping[str, Quantity]:
        """Return the declarations by field, in order. Fields without a declaration, such as a name, are left out."""
        return _declared(cls)  # type: ignore[arg-type]  # a class is hashable, even if its instances are not

    def plus(self: _R, other: Record) -> _R:
        """Return the sum of two records of the same time. Levels add up as counts do."""
        return _joined(self, other, "plus")

    def then(self: _R, later: _R) -> _R:
        """Return the sum of this record and a later one. The later record gives levels and states."""
        return _joined(self, later, "then")

    def since(self: _R, earlier: _R) -> _R:
        """Return the counts since an earlier record, each at least 0."""
        return _joined(self, earlier, "since")

    def at_rest(self: _R) -> _R:
        """Return this record with all levels 0, as after the end of all workers and passes."""
        found: dict[str, Any] = {}
        for name, quantity in self.declared().items():
            value = getattr(self, name)
            if quantity.rule is _LEVEL:
                found[name] = type(value)()
            elif quantity.rule is _BY_NAME:
                found[name] = {key: one.at_rest() if isinstance(one, Record) else one for key, one in value.items()}
        return replace(self, **found)

    def traced(self) -> dict[str, Any]:
        """Return, as JSON values, the fields of a trace that differ from an empty record."""
        empty = _empty(type(self))  # type: ignore[arg-type]  # a class is hashable, even if its instances are not
        traced = {name: getattr(self, name) for name, one in self.declared().items() if one.is_traced}
        return {name: _as_traced(value) for name, value in traced.items() if value != getattr(empty, name)}

    def narrowed(self, kind: type[_T], **others: Any) -> _T:
        """Return an instance of ``kind``, with the values of the fields that this record has too, and ``others``."""
        names = [one.name for one in fields(kind)]  # type: ignore[arg-type]
        return kind(**{**{name: getattr(self, name) for name in names if hasattr(self, name)}, **others})


@cache
def _declared(record: type[Record]) -> Mapping[str, Quantity]:
    return {one.name: one.metadata[_DECLARED] for one in fields(record) if _DECLARED in one.metadata}


@cache
def _empty(record: type[Record]) -> Record:
    return record()


@cache
def _joins(record: Any, other: Any, how: str) -> list[tuple[str, Callable[[Any, Any], Any]]]:
    """Return the fields that both records have, with the functions that join them."""
    return [(name, getattr(one.rule, how)) for name, one in record.declared().items() if name in other.declared()]


def _joined(record: _R, other: Record, how: str) -> _R:
    mine: Any = type(record)
    theirs: Any = type(other)
    values, others = dict(vars(record)), vars(other)
    for name, join in _joins(mine, theirs, how):
        values[name] = join(values[name], others[name])
    joined: _R = mine(**values)
    return joined


# -- JSON --------------------------------------------------------------------------------------------------------------


def as_json(
    value: Any, *, members: Callable[[Any], Mapping[str, Any]] = vars, infinite: Callable[[float], Any] = str
) -> Any:
    """Return a value in the types that JSON has. A class, a function or a path becomes its name.

    Args:
        members: Returns the members of a dataclass, which becomes an object.
        infinite: Returns the value for inf, -inf and nan.
    """
    if isinstance(value, float) and not math.isfinite(value):
        return infinite(float(value))
    if value is None or isinstance(value, (int, float, str)):
        return value
    if is_dataclass(value) and not isinstance(value, type):
        value = members(value)
    elif isinstance(value, tuple) and hasattr(value, "_asdict"):
        value = value._asdict()
    if isinstance(value, Mapping):
        return {str(name): as_json(item, members=members, infinite=infinite) for name, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [as_json(item, members=members, infinite=infinite) for item in value]
    return getattr(value, "__qualname__", str(value))


def _as_traced(value: Any) -> Any:
    if isinstance(value, Record):
        return value.traced()
    if isinstance(value, Mapping):
        return {name: _as_traced(one) for name, one in value.items()}
    return as_json(value)


# -- joining values ----------------------------------------------------------------------------------------------------


def _added(one: Any, other: Any) -> Any:
    """Add two values. None means not measured, and adds nothing."""
    return other if one is None else one if other is None else one + other


def _grown(now: Any, earlier: Any) -> Any:
    return now if now is None or earlier is None else max(now - now, now - earlier)


def _larger(one: Any, other: Any) -> Any:
    return other if one is None else one if other is None else max(one, other)


def _later(_: Any, later: Any) -> Any:
    return later


def _as_it_is(now: Any, _: Any) -> Any:
    return now


def _each_added(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))


def _each_grown(now: tuple[int, ...], earlier: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(max(0, a - b) for a, b in zip_longest(now, earlier, fillvalue=0))


def _all_names(how: str, join: Callable[[Any, Any], Any]) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Any]:
    """Join values of the same name, and keep all others. In ``then``, records without a later one lose their levels."""

    def joined(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, Any]:
        def alone(name: str, value: Any) -> Any:
            return value.at_rest() if how == "then" and isinstance(value, Record) and name not in other else value

        both = {
            name: getattr(one[name], how)(other[name])
            if isinstance(one[name], Record)
            else join(one[name], other[name])
            for name in one.keys() & other.keys()
        }
        known = {**one, **other} if how != "since" else one
        return {name: both[name] if name in both else alone(name, value) for name, value in known.items()}

    return joined


_COUNTER = Rule(_added, _added, _grown)
_LEVEL = Rule(_added, _later, _as_it_is)
_STATE = Rule(_larger, _later, _as_it_is)
_HISTOGRAM = Rule(_each_added, _each_added, _each_grown)
_TEXT_BY_NAME = Rule(_all_names("plus", _later), _all_names("then", _later), _as_it_is)
_BY_NAME = Rule(_all_names("plus", _added), _all_names("then", _added), _all_names("since", _grown))


# -- declarations ------------------------------------------------------------------------------------------------------


def counter(what: str, unit: Unit = "", *, default: Any = 0, **more: Any) -> Any:
    """Declare a count, or a sum of seconds or bytes, which only grows. Its default may be None: not measured."""
    if unit == "seconds" and default == 0:
        default = 0.0
    return _field(_COUNTER, what, unit, more, default=default)


def level(what: str, unit: Unit = "", *, default: Any = 0, **more: Any) -> Any:
    """Declare a present number, which adds up over iterators that run at the same time."""
    return _field(_LEVEL, what, unit, more, default=default)


def state(what: str, unit: Unit = "", *, default: Any = 0, **more: Any) -> Any:
    """Declare a present state, which does not add up."""
    return _field(_STATE, what, unit, more, default=default)


def latest(what: str, unit: Unit = "seconds", **more: str) -> Any:
    """Declare the time of the latest event by the monotonic clock; 0: no event yet."""
    return _field(Rule(max, max, _as_it_is), what, unit, more, default=0.0)


def histogram(what: str, buckets: tuple[float, ...], **more: str) -> Any:
    """Declare counts by bucket, the unbounded bucket last. ``buckets``: Upper bounds of all other buckets."""
    return _field(_HISTOGRAM, what, "seconds", {"is_traced": False, "buckets": buckets, **more}, default=())


def by_name(what: str, unit: Unit = "", *, is_text: bool = False, **more: Any) -> Any:
    """Declare counts, records or, if ``is_text``, texts by name. Of two texts, the later one is kept."""
    rule = _TEXT_BY_NAME if is_text else _BY_NAME
    return _field(rule, what, unit, {"is_traced": False, **more}, default_factory=dict)


def few_of_many(what: str, join: Callable[[Any, Any], Any], unit: Unit = "", **more: Any) -> Any:
    """Declare some of many values. ``join`` chooses among the values of two records. Values are never subtracted."""
    return _field(Rule(join, join, _as_it_is), what, unit, {"is_traced": False, **more}, default=())


def log(what: str, empty: Callable[[], Any], join: Callable[[Any, Any], Any], since: Callable[[Any, Any], Any]) -> Any:
    """Declare a log of single values. ``join`` joins two logs; ``since`` returns the values after an earlier log."""
    return _field(Rule(join, join, since), what, "", {"is_traced": False}, default_factory=empty)


def _field(rule: Rule, what: str, unit: Unit, more: Mapping[str, Any], **default: Any) -> Any:
    return field(**default, metadata={_DECLARED: Quantity(rule=rule, help=what, unit=unit, **more)})
