"""States of the plain generators that a dataset keeps for itself, as a part of a logical worker's state.

A logical worker of ``seeding="worker"`` may be restarted after a death, share a worker with others, or be resumed in a
later run. Its state holds those of the global generators, and those of the generators of Python, NumPy and torch that
lie in its dataset and its collate function, by the names of the places where they lie. Whatever else a dataset changes
in itself is lost then, unless the dataset has ``state_dict()``.
"""

from __future__ import annotations

import logging
from typing import Any

from dpex.errors import StateError
from dpex.worker.own_generators import plain_generators
from dpex.worker.rng_state import set_state, state_of

logger = logging.getLogger("dpex")

OwnStates = dict[str, Any]
"""States by place, as `dpex.worker.rng_state.state_of` returns them."""


class OwnStateKeeper:
    """Reads and sets the states of the generators that lie in one dataset and its collate function."""

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._found: dict[str, Any] = {}
        self._at_first: OwnStates = {}
        try:
            found = list(plain_generators(dataset, collate_fn))
        except Exception as error:  # of an object that stands for another, and cannot load it here
            logger.debug("no generators are looked for in %s: %r", type(dataset).__name__, error)
            return
        for name, one in found:
            try:
                self._at_first[name] = state_of(one)
            except Exception:  # of a bit generator that cannot tell
                continue
            self._found[name] = one

    def states(self) -> OwnStates:
        """The states as they are now."""
        return {name: state_of(one) for name, one in self._found.items()}

    def reset(self) -> None:
        """Set the generators to the states in which they were found."""
        self.restore(self._at_first)

    def restore(self, states: OwnStates) -> None:
        """Set the generators to ``states``; one that lies at none of their places stays as it is.

        Raises:
            StateError: A state is of another kind of generator than the one that lies there.
        """
        for name, state in states.items():
            one = self._found.get(name)
            if one is None:
                continue
            try:
                set_state(one, state)
            except Exception as error:
                kind = f"{type(one).__module__}.{type(one).__qualname__}"
                raise StateError(
                    f"{name} is a {kind}, and the state is of another kind of generator: {error}. Go on with the "
                    "dataset with which the run began"
                ) from error
