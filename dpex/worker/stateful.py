"""States of datasets and samplers that have one: what ``torchdata`` calls stateful."""

from __future__ import annotations

from typing import Any

from dpex.core.probing import attribute


def is_stateful(thing: Any) -> bool:
    """Whether it has ``state_dict()`` and ``load_state_dict()``."""
    return callable(attribute(thing, "state_dict")) and callable(attribute(thing, "load_state_dict"))


def state_of(thing: Any) -> Any:
    """Its state; None where it has none."""
    return thing.state_dict() if is_stateful(thing) else None


def load_state(thing: Any, state: Any) -> None:
    """Give it a state that `state_of` returned."""
    if state is not None and is_stateful(thing):
        thing.load_state_dict(state)
