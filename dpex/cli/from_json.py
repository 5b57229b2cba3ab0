"""Dataclasses from the JSON that `dpex.autotune.trace` writes, with the types of their fields checked. PURE.

Numbers that JSON lacks are the strings "inf", "-inf" and "nan".
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

_NOT_JSON = ("inf", "-inf", "nan")
_T = TypeVar("_T")


@cache
def _fields_of(kind: Any) -> tuple[tuple[str, Any, bool], ...]:
    hints = get_type_hints(kind)
    return tuple((f.name, hints[f.name], f.default is MISSING and f.default_factory is MISSING) for f in fields(kind))


def build(kind: type[_T], record: Any) -> _T:
    """A dataclass from its object; unknown fields are passed over, missing ones take their defaults.

    Raises:
        TypeError, ValueError: a field is missing that has no default, or is of another type.
    """
    if not isinstance(record, Mapping):
        raise TypeError(f"{kind.__name__}: {record!r} where an object should be")
    values: dict[str, Any] = {}
    for name, hint, required in _fields_of(kind):  # type: ignore[arg-type]  # a class, not Hashable?
        if name in record:
            values[name] = _value(hint, record[name], f"{kind.__name__}.{name}")
        elif required:
            raise ValueError(f"{kind.__name__} without {name!r}")
    return kind(**values)


def _value(hint: Any, value: Any, where: str) -> Any:
    if hint is float:
        return _number(value, where)
    if hint in (int, str, bool):
        if type(value) is not hint:
            raise TypeError(f"{where}: {value!r} is no {hint.__name__}")
        return value
    if is_dataclass(hint):
        return build(hint, value)  # type: ignore[arg-type]
    return _compound(hint, value, where)


def _number(value: Any, where: str) -> float:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return value
    if value in _NOT_JSON:
        return float(value)
    raise TypeError(f"{where}: {value!r} is no number")


def _compound(hint: Any, value: Any, where: str) -> Any:
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in inner:
            return None
        return _value(next(one for one in inner if one is not type(None)), value, where)
    if origin is Literal:
        return _value(str, value, where)  # a newer dpex may know more of them
    if origin is tuple and isinstance(value, list):
        return tuple(_value(inner[0], item, where) for item in value)
    if origin is Mapping and isinstance(value, Mapping):
        return {name: _value(inner[1], item, where) for name, item in value.items()}
    raise TypeError(f"{where}: {value!r} is no {hint}")
