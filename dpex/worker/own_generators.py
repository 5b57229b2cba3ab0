"""Random generators that a dataset keeps for itself, as transforms of MONAI and albumentations do.

Every worker gets a copy of a generator in the dataset. Unseeded copies draw the same numbers, and the draws of a batch
depend on its worker. So a worker begins with a search for generators of Python, NumPy and torch in the dataset and the
collate function. Under ``seeding="batch"`` it seeds each generator for each batch, from the batch's seed and the
generator's rank in the search. Under ``seeding="worker"`` the generators' states belong to a logical worker, which may
restart after a death, share a process with other logical workers, or resume in a later run.

The search examines attributes of objects, attributes of classes (MONAI's transforms share one generator in this way),
items of lists and dicts, and the outer variables of functions. It ends after `MOST_OBJECTS` objects.
"""

from __future__ import annotations

import functools
import logging
import random
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import torch

from dpex.errors import StateError
from dpex.schedule.names import is_a
from dpex.schedule.seeding import ticket_seed
from dpex.worker.decoded_stream import DecodedStream, users_dataset
from dpex.worker.states import GLOBAL, generator_state, set_generator_state

logger: logging.Logger = logging.getLogger("dpex")

MOST_OBJECTS = 5000
"""Maximum number of objects of a dataset that are searched, which takes a few milliseconds."""
MOST_ITEMS = 64
"""Maximum number of items of a list or dict that are searched, because transforms are few and samples are many."""
GENERATORS = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), np.ndarray, torch.Tensor, type, types.ModuleType)


class OwnGenerators:
    """The generators in a dataset and its collate function. ``found``: generators by path (``Images.transform.rng``).

    Only their states move with a logical worker. Other changes of its dataset are lost, unless it has ``state_dict()``.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self.found: dict[str, Any] = {}
        self._at_first: dict[str, Any] = {}
        try:
            found = list(own_generators(dataset, collate_fn))
        except Exception as error:  # a lazy proxy in the dataset cannot load its target in this process
            logger.debug("no generators are looked for in %s: %r", type(dataset).__name__, error)
            return
        for name, one in found:
            try:
                self._at_first[name] = generator_state(one)
            except Exception:  # a bit generator has no state
                continue
            self.found[name] = one

    def __bool__(self) -> bool:
        return bool(self.found)

    def seed(self, seed: int) -> None:
        for place, one in enumerate(self.found.values()):
            _seed(one, ticket_seed(seed, place))

    def states(self) -> dict[str, Any]:
        """Return the present states, as `dpex.worker.states.generator_state` returns them, by path."""
        return {name: generator_state(one) for name, one in self.found.items()}

    def reset(self) -> None:
        self.restore(self._at_first)

    def restore(self, states: dict[str, Any]) -> None:
        """Set the generators to ``states``. A generator whose path is not in ``states`` keeps its state.

        Raises StateError if a state and the generator at its path are of different kinds.
        """
        for name, state in states.items():
            one = self.found.get(name)
            if one is None:
                continue
            try:
                set_generator_state(one, state)
            except Exception as error:
                kind = f"{type(one).__module__}.{type(one).__qualname__}"
                raise StateError(
                    f"{name} is a {kind}, and the state is of another kind of generator: {error}. Resume with the "
                    "dataset with which the run began"
                ) from error


def _seed(generator: Any, seed: int) -> None:
    if isinstance(generator, random.Random):
        generator.seed(seed)
    elif isinstance(generator, np.random.Generator):
        bits = generator.bit_generator
        bits.state = type(bits)(seed).state
    elif isinstance(generator, np.random.RandomState):
        kind = getattr(np.random, generator.get_state(legacy=False)["bit_generator"])
        generator.set_state({**kind(seed).state, "has_gauss": 0, "gauss": 0.0})
    else:
        generator.manual_seed(seed)


# -- finding -----------------------------------------------------------------------------------------------------------


def own_generators(dataset: Any, collate_fn: Any) -> Iterator[tuple[str, Any]]:
    """Yield each generator with its path, in breadth-first order."""
    waiting = deque([_root(dataset), ("collate_fn", collate_fn)])
    seen: set[int] = set()
    in_class = functools.cache(_in_class)
    while waiting and len(seen) < MOST_OBJECTS:
        name, one = waiting.popleft()
        if id(one) in seen:
            continue
        if is_a(one, _LEAVES):
            continue
        seen.add(id(one))
        if is_own_generator(one):
            yield name, one
        else:
            waiting.extend(_parts(name, one, in_class))


def _root(dataset: Any) -> tuple[str, Any]:
    """Return the object that makes the samples of a batch, with its name. A stream's source is left out."""
    inner = users_dataset(dataset)
    name = type(inner).__name__
    if isinstance(inner, DecodedStream):
        return f"{name}.fn", inner.fn
    return name, inner


def is_own_generator(one: Any) -> bool:
    """Return True for a generator of Python, NumPy or torch that is not one of the global ones, which dpex seeds."""
    if not is_a(one, GENERATORS) or is_a(one, random.SystemRandom):
        return False
    return all(one is not each for each in GLOBAL.values())


def _parts(name: str, one: Any, in_class: Callable[[Any], dict[str, Any]]) -> Iterator[tuple[str, Any]]:
    """Yield the parts of an object that can be found without calling a method of it."""
    if is_a(one, dict):
        for key, value in islice(dict.items(one), MOST_ITEMS):
            yield f"{name}[{key!r}]", value
    elif is_a(one, (list, tuple)):
        items: Iterator[Any] = list.__iter__(one) if is_a(one, list) else tuple.__iter__(one)
        for place, value in enumerate(islice(items, MOST_ITEMS)):
            yield f"{name}[{place}]", value
    elif is_a(one, functools.partial):
        yield from ((f"{name}.func", one.func), (f"{name}.args", one.args), (f"{name}.keywords", one.keywords))
    elif is_a(one, types.MethodType):
        yield f"{name}.__self__", one.__self__
    elif is_a(one, types.FunctionType):
        for variable, cell in zip(one.__code__.co_freevars, one.__closure__ or (), strict=False):
            try:
                yield f"{name}.{variable}", cell.cell_contents
            except ValueError:
                continue  # the variable has no value yet
    else:
        try:
            attributes = dict(vars(one))
        except Exception:  # no attributes, or a lazy proxy whose target is missing
            return
        for attribute, value in {**in_class(type(one)), **attributes}.items():
            yield f"{name}.{attribute}", value


def _in_class(kind: Any) -> dict[str, Any]:
    found = (item for each in reversed(kind.__mro__) for item in vars(each).items())
    return {name: value for name, value in found if is_own_generator(value)}
