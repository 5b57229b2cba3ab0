"""Find the part of an object that cannot be pickled. Messages name it by the path of attributes that leads to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any

_SEARCH_LEVELS = 6
"""Maximum depth of the search for the attribute of a dataset that cannot be pickled."""
_SEARCH_VALUES = 2000
"""Maximum number of values that the search tries. It pickles each of them once more."""


def explain_spawn(obj: Any, error: Exception) -> str:
    """Return the path and type of the part of ``obj`` that a spawned process cannot receive, the error, the remedy."""
    return explain(obj, error, _is_spawnable)


def _is_spawnable(value: Any) -> bool:
    """Return True if `multiprocessing` can pickle ``value``, or raises a RuntimeError. Its locks and queues raise a
    RuntimeError here, because they can be pickled only while a process is spawned."""
    try:
        ForkingPickler.dumps(value)
    except Exception as error:
        return isinstance(error, RuntimeError)
    return True


def explain(obj: Any, error: Exception, travels: Callable[[Any], bool]) -> str:
    """Return the path and type of the part of ``obj`` that cannot be pickled, the error, and the remedy.

    ``travels``: Returns True for an object that can be pickled.
    """
    path, value = _find_culprit(obj, "", (), iter(range(_SEARCH_VALUES)), travels) or ("", obj)
    kind = type(value)
    name = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
    remedy = "leave it out of the pickle (__getstate__) or open it lazily in the worker"
    if isinstance(value, (type, FunctionType)):
        remedy = "define it at the top of a module"
    place = path.removeprefix(".setup").removeprefix(".") or "the object"
    return f"{place} (a {name}) cannot be pickled: {error}; {remedy}"


def _find_culprit(
    value: Any, path: str, above: tuple[int, ...], budget: Iterator[int], travels: Callable[[Any], bool]
) -> tuple[str, Any] | None:
    """Return the path and the deepest part that fails; None if ``value`` fails only by referring to its owner."""
    above = (*above, id(value))
    innocent = False
    for step, part in _parts(value) if len(above) <= _SEARCH_LEVELS else ():
        if id(part) in above:
            innocent = True
        elif next(budget, None) is not None and not travels(part):
            found = _find_culprit(part, path + step, above, budget, travels)
            if found is not None:
                return found
            innocent = True
    return None if innocent and len(above) > 1 else (path, value)


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        yield from ((f"[{key!r}]", part) for key, part in value.items())
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{i}]", part) for i, part in enumerate(value))
    attributes = getattr(value, "__dict__", None)
    if isinstance(attributes, dict):
        yield from ((f".{name}", part) for name, part in attributes.items())
    yield from _parts_of_functions(value)


def _parts_of_functions(value: Any) -> Iterator[tuple[str, Any]]:
    function = getattr(value, "__func__", value)
    if function is not value:
        yield ".__self__", value.__self__
    names = getattr(getattr(function, "__code__", None), "co_freevars", ())
    for name, cell in zip(names, getattr(function, "__closure__", None) or (), strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:
            continue
    if hasattr(value, "func") and hasattr(value, "args"):  # functools.partial
        yield ".func", value.func
        yield ".args", value.args
        yield ".keywords", getattr(value, "keywords", {})
