"""States of datasets and samplers that have one: what ``torchdata`` calls stateful.

``state_dict()`` is the user's code, which may be slow, warn or fail. So it is called only where somebody can use what
it returns: once a state of the loader was asked for or loaded.
"""

from __future__ import annotations

import inspect
from typing import Any

from dpex.schedule.probing import attribute


def is_stateful(thing: Any) -> bool:
    """Return True if it has a ``state_dict()`` that takes no argument and a ``load_state_dict(state)``.

    Methods of these names with other arguments are none of torchdata's: litdata's ``state_dict`` takes three, and is
    for its own loader.
    """
    return _takes(attribute(thing, "state_dict"), 0) and _takes(attribute(thing, "load_state_dict"), 1)


def _takes(method: Any, count: int) -> bool:
    """Return True if ``method`` can be called with so many positional arguments, as far as that is known."""
    if not callable(method):
        return False
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of compiled code nothing is known
        return True
    try:
        signature.bind(*[None] * count)
    except TypeError:
        return False
    return True


def state_of(thing: Any) -> Any:
    """Its state; None where it has none."""
    return thing.state_dict() if is_stateful(thing) else None


def load_state(thing: Any, state: Any) -> None:
    """Give it a state that `state_of` returned."""
    if state is not None and is_stateful(thing):
        thing.load_state_dict(state)
