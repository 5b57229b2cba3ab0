"""Look into objects of the user, which may raise anything: for loader, engine and workers alike.

A dataset may forward unknown attributes to a table and raise KeyError, and may hold a dead weak proxy or a stand-in for
something that is not there. All that dpex asks of such objects beyond what torch asks goes through these functions.
"""

from __future__ import annotations

from typing import Any


def attribute(thing: Any, name: str, default: Any = None) -> Any:
    """Return ``thing.name``, or ``default`` if the attribute is missing or reading it raises any exception."""
    try:
        return getattr(thing, name, default)
    except Exception:
        return default


def is_a(thing: Any, kinds: type | tuple[type, ...]) -> bool:
    """Return True if ``thing`` is an instance of ``kinds``, and False if testing that raises any exception."""
    try:
        return isinstance(thing, kinds)
    except Exception:
        return False
