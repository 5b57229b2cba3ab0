"""Random generators that a dataset keeps for itself, as transforms of MONAI and albumentations do.

dpex seeds the global generators for each batch of ``seeding="batch"``. A generator that lies in the dataset is copied
with it into every worker: copies draw the same numbers, and the draws of a batch depend on its worker. So generators of
known kinds, and of those that users add (`register_rng`), are looked for in the dataset and the collate function when a
worker begins. They are reseeded there for each batch by their own interface. Plain generators of Python, NumPy and
torch have none: `warn_of_unseeded` names them. Under ``seeding="worker"`` the states of plain generators belong to the
state of a logical worker (`OwnStateKeeper`).

The search looks at attributes, items of lists and dicts, and the variables that functions are bound to, up to
`MOST_OBJECTS`. It also looks into the objects of MONAI and albumentations: they reseed their own generators, and not
always those of their parts. MONAI's `SmartCacheDataset` does not reach its transforms, and its `Compose` only those of
MONAI.
"""

from __future__ import annotations

import functools
import logging
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from dpex.errors import OptionError, StateError
from dpex.schedule.probing import is_a
from dpex.schedule.seeding import ticket_seed
from dpex.system.user_warnings import warn
from dpex.worker.current_batch import batch_seed
from dpex.worker.decoded_stream import DecodedStream, users_dataset
from dpex.worker.rng_state import GLOBAL, set_state, state_of

logger = logging.getLogger("dpex")

MOST_OBJECTS = 5000
"""Objects of a dataset that are looked at; it takes a few milliseconds."""
MOST_ITEMS = 64
"""Items of a list or dict that are looked at: transforms are few, and samples are many."""
_SEED_BITS = 32
"""Every generator takes a seed of this many bits."""

Made = TypeVar("Made")
Reseed = Callable[[Any, int], Any]
Registered = tuple[tuple[type, Reseed], ...]
"""Classes of objects that have generators, each with a function that reseeds one; the last added comes first."""


class _Kind(NamedTuple):
    """A class of a library, looked up where that is imported, and the method that reseeds it."""

    module: str
    name: str
    reseed: Reseed


_KNOWN = (
    _Kind("monai.transforms.transform", "Randomizable", lambda one, seed: one.set_random_state(seed=seed)),
    _Kind("albumentations.core.composition", "BaseCompose", lambda one, seed: one.set_random_seed(seed)),
    _Kind("albumentations.core.transforms_interface", "BasicTransform", lambda one, seed: one.set_random_seed(seed)),
)
"""Seen with MONAI 1.6 and albumentations 2.0. Each makes itself new generators."""
_PLAIN = (np.random.Generator, np.random.RandomState, random.Random, torch.Generator)
_LEAVES = (str, bytes, bytearray, int, float, complex, type(None), np.ndarray, torch.Tensor, type, types.ModuleType)
_registered: list[tuple[type, Reseed]] = []
_named: set[str] = set()


def register_rng(kind: type, reseed: Callable[[Any, int], Any]) -> None:
    """Have objects of a class reseeded for each batch, where a dataset or a collate function has such objects.

    Under ``seeding="batch"``, and so under ``num_workers="auto"``, ``reseed`` is called before each batch with each
    object of that class (or of one derived from it) that dpex finds in the dataset. The seed depends on the base seed,
    the epoch, the number of the batch and the object's place. So draws differ between batches, and are the same in any
    worker. Randomizable transforms of MONAI and transforms of albumentations are known without this. Call it before the
    first ``iter()`` of a loader.

    Args:
        kind: The class. One that is registered again gets the new function.
        reseed: A function of the object and the seed, a whole number of 32 bits. It must also reseed the parts of the
            object. Its return value is ignored.

    Raises:
        OptionError: ``kind`` is no class, or ``reseed`` cannot be called. It is a ValueError.

    Examples:
        >>> import random
        >>> import dpex
        >>> class Flip:
        ...     def __init__(self):
        ...         self.rng = random.Random()
        ...     def __call__(self, image):
        ...         return image[::-1] if self.rng.random() < 0.5 else image
        >>> dpex.register_rng(Flip, lambda flip, seed: flip.rng.seed(seed))
    """
    if not isinstance(kind, type):
        raise OptionError(f"register_rng(kind={kind!r}): give a class")
    if not callable(reseed):
        raise OptionError(f"register_rng(reseed={reseed!r}): give a function of an object and a seed")
    _registered[:] = [(kind, reseed), *(one for one in _registered if one[0] is not kind)]


def registered() -> Registered:
    """Return the classes that users have registered."""
    return tuple(_registered)


class OwnGenerators:
    """The generators of one dataset that can be reseeded, given in the order in which they were found: outer first.

    Inner ones are reseeded first, so that an object which reseeds its parts has the last word about them.
    """

    def __init__(self, found: list[tuple[Any, Reseed]]) -> None:
        self._found = [(place, one, reseed) for place, (one, reseed) in enumerate(found)][::-1]

    def reseed(self, seed: int) -> None:
        """Reseed each for the batch of that seed."""
        for place, one, reseed in self._found:
            reseed(one, ticket_seed(seed, place) % (1 << _SEED_BITS))


def own_generators(dataset: Any, collate_fn: Any, registered: Registered) -> OwnGenerators | None:
    """Return the generators of a dataset and a collate function that are reseeded, or None if it has none."""
    found = [(one, reseed) for _, one, reseed in _found_in(dataset, collate_fn, registered) if reseed is not None]
    return OwnGenerators(found) if found else None


def reseeding(fetch: Callable[[Any], Made], own: OwnGenerators | None) -> Callable[[Any], Made]:
    """Return ``fetch`` with a reseeding of the generators before it; ``fetch`` itself if ``own`` is None."""
    if own is None:
        return fetch

    def fetch_reseeded(index: Any) -> Made:
        own.reseed(batch_seed())
        return fetch(index)

    return fetch_reseeded


def warn_of_unseeded(dataset: Any, collate_fn: Any, registered: Registered) -> None:
    """Warn, once for each name, of generators that are not reseeded."""
    for name, one, reseed in _found_in(dataset, collate_fn, registered):
        if reseed is None and name not in _named:
            _named.add(name)
            kind = f"{type(one).__module__}.{type(one).__qualname__}"
            warn(
                f"{name} is a random generator ({kind}) that dpex cannot reseed: each worker has a copy, so draws "
                "repeat, and depend on the worker that makes a batch. Draw from the global generators of random, NumPy "
                "or torch, which dpex seeds for each batch; or make the generator in __getitem__, from "
                "(dpex.batch_seed(), index); or tell dpex how to reseed the object that holds it, with "
                "dpex.register_rng"
            )


class OwnStateKeeper:
    """Reads and sets the states of the plain generators that lie in one dataset and its collate function.

    A logical worker of ``seeding="worker"`` may be restarted after a death, share a worker with others, or resume in a
    later run. Its state holds the states of these generators, by the names of their places. Other changes of a
    dataset are lost then, unless the dataset has ``state_dict()``.
    """

    def __init__(self, dataset: Any, collate_fn: Any) -> None:
        self._found: dict[str, Any] = {}
        self._at_first: dict[str, Any] = {}
        try:
            found = list(_looked_through(dataset, collate_fn, (), ()))
        except Exception as error:  # of an object that stands for another, and cannot load it here
            logger.debug("no generators are looked for in %s: %r", type(dataset).__name__, error)
            return
        for name, one, _ in found:
            try:
                self._at_first[name] = state_of(one)
            except Exception:  # of a bit generator without a state
                continue
            self._found[name] = one

    def states(self) -> dict[str, Any]:
        """Return the present states, as `dpex.worker.rng_state.state_of` returns them, by place."""
        return {name: state_of(one) for name, one in self._found.items()}

    def reset(self) -> None:
        """Set the generators to the states in which they were found."""
        self.restore(self._at_first)

    def restore(self, states: dict[str, Any]) -> None:
        """Set the generators to ``states``; one whose place is not among them stays as it is.

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
                    f"{name} is a {kind}, and the state is of another kind of generator: {error}. Resume with the "
                    "dataset with which the run began"
                ) from error


# -- finding -----------------------------------------------------------------------------------------------------------


def _found_in(dataset: Any, collate_fn: Any, registered: Registered) -> Iterator[tuple[str, Any, Reseed | None]]:
    """Yield the name of each generator, itself, and the function that reseeds it, if any; the nearest come first."""
    return _looked_through(dataset, collate_fn, registered, tuple(_imported()))


def _looked_through(
    dataset: Any, collate_fn: Any, registered: Registered, known: Registered
) -> Iterator[tuple[str, Any, Reseed | None]]:
    """Yield as `_found_in` does, with these classes of objects that are reseeded.

    A registered one reseeds all that it consists of, and is not looked into. A known one reseeds plain generators that
    are attributes of it, or lie in lists and dicts that are.
    """
    waiting = deque([(*_root(dataset), False), ("collate_fn", collate_fn, False)])
    seen: set[int] = set()
    while waiting and len(seen) < MOST_OBJECTS:
        name, one, is_owned = waiting.popleft()
        if id(one) in seen or is_a(one, _LEAVES):
            continue
        seen.add(id(one))
        if (reseed := _reseed_of(one, registered)) is not None:
            yield name, one, reseed
        elif (reseed := _reseed_of(one, known)) is not None:
            yield name, one, reseed
            waiting.extend((*part, True) for part in _parts(name, one))
        elif not _is_plain_generator(one):
            is_owned = is_owned and is_a(one, (dict, list, tuple))
            waiting.extend((*part, is_owned) for part in _parts(name, one))
        elif not is_owned:
            yield name, one, None


def _reseed_of(one: Any, kinds: Registered) -> Reseed | None:
    return next((reseed for kind, reseed in kinds if is_a(one, kind)), None)


def _root(dataset: Any) -> tuple[str, Any]:
    """Return the object that makes the samples of a batch, with its name. Generators that a stream reads with stay."""
    inner = users_dataset(dataset)
    name = type(inner).__name__
    if isinstance(inner, DecodedStream):
        return f"{name}.fn", inner.fn
    return name, inner


def _imported() -> Iterable[tuple[type, Reseed]]:
    for kind in _KNOWN:
        found = getattr(sys.modules.get(kind.module), kind.name, None)
        if isinstance(found, type):
            yield found, kind.reseed


def _is_plain_generator(one: Any) -> bool:
    """Return True for a generator of Python, NumPy or torch that is not one of the global ones, which dpex seeds."""
    if not is_a(one, _PLAIN) or is_a(one, random.SystemRandom):
        return False
    return all(one is not each for each in GLOBAL.values())


def _parts(name: str, one: Any) -> Iterator[tuple[str, Any]]:
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
                continue  # it has no value yet
    else:
        yield from _attributes(name, one)


def _attributes(name: str, one: Any) -> Iterator[tuple[str, Any]]:
    try:
        attributes = dict(vars(one))
    except Exception:  # it has none, or is a stand-in for something that is not there
        return
    for attribute, value in attributes.items():
        yield f"{name}.{attribute}", value
