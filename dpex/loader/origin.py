"""What a loader was made from, carried by a number that every framework copies when it builds a loader anew.

Frameworks build a plain `torch.utils.data.DataLoader` from the attributes of another loader, and know nothing of
dpex's. The attribute ``timeout`` is one that all of them copy, and nothing else is done with it, so a
`DpexDataLoader` has there a number of a class of its own, which has an `Origin`. ``num_workers`` would do as well, but
people keep it in checkpoints, where `torch.load` refuses classes that it does not know; only where the user asks for
it, as with `dpex.num_workers`, does it carry an origin.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from dpex.options import Options
from dpex.schedule.probing import attribute
from dpex.schedule.streams import Streams

if TYPE_CHECKING:
    from dpex.loader.runtime import LoaderRuntime

DEFAULTS: Mapping[str, Any] = {field.name: field.default for field in fields(Options)} | {
    "seeding": None,
    "device": None,
    "device_transform": None,
}
"""What the constructor of `DpexDataLoader` takes where an option is left out."""
OPTION_NAMES = tuple(DEFAULTS)
_CARRIERS = ("num_workers", "timeout")
"""Attributes in which an origin may lie, in the order in which they count."""


class Origin:
    """What a loader has beyond torch's arguments, kept up to date by the loader as long as it lives.

    loader_class: `DpexDataLoader`, which makes the proxies. options: dpex's, by name. workers: the number that was
    given or chosen. is_auto: whether it was chosen. streams: why that number, for an iterable dataset. prefetch_factor:
    where the user gave one; in_order: torch's; both are here as not every framework copies them.
    """

    def __init__(
        self,
        loader_class: Any,
        options: Mapping[str, Any],
        *,
        workers: int,
        is_auto: bool,
        streams: Streams | None = None,
        prefetch_factor: int | None = None,
        in_order: bool = True,
        loader: Any = None,
    ) -> None:
        self.loader_class = loader_class
        self.options = dict(options)
        self.workers = workers
        self.is_auto = is_auto
        self.streams = streams
        self.prefetch_factor = prefetch_factor
        self.in_order = in_order
        self._loader = None if loader is None else weakref.ref(loader)

    @property
    def loader(self) -> Any:
        """The user's own, while it lives."""
        return None if self._loader is None else self._loader()

    def is_auto_for(self, num_workers: int | str) -> bool:
        """Whether a loader with so many workers is to be tuned as this one is: a number that was set later is meant."""
        return self.is_auto and num_workers == self.workers

    def runtime_for(self, dataset: Any) -> LoaderRuntime | None:
        """The runtime of the user's own loader, if the dataset is that loader's or wraps it; else None.

        What is made from a loader shares its runtime, so that the user's own object shows decisions and figures.
        """
        loader = self.loader
        if loader is None or loader.dataset not in _Same((dataset, attribute(dataset, "dataset"))):
            return None
        runtime: LoaderRuntime = loader._runtime
        return runtime

    def of(self, loader: Any) -> Origin:
        """The same of another loader, such as a copy."""
        state = {name: value for name, value in vars(self).items() if name != "_loader"}
        return Origin(**state, loader=loader)

    def __reduce__(self) -> tuple[Any, ...]:
        state = {
            name: value for name, value in vars(self).items() if name not in ("loader_class", "options", "_loader")
        }
        return _restore, (self.loader_class, self.options, state)


def _restore(loader_class: Any, options: Mapping[str, Any], state: Mapping[str, Any]) -> Origin:
    loader_class._recognise_rebuilt()  # it may arrive in a process in which no loader of dpex's was made yet
    return Origin(loader_class, options, **state)


class _Same(tuple[Any, ...]):
    """Contains objects by identity."""

    __slots__ = ()

    def __contains__(self, item: object) -> bool:
        return any(item is one for one in self)


class CarryingInt(int):
    """A whole number that has an origin."""

    origin: Origin

    def __reduce__(self) -> tuple[Any, ...]:
        return carrying, (int(self), self.origin)


class CarryingFloat(float):
    """Any other number that has one."""

    origin: Origin

    def __reduce__(self) -> tuple[Any, ...]:
        return carrying, (float(self), self.origin)


def carrying(number: Any, origin: Origin) -> Any:
    """The same number with that origin; what is neither an int nor a float stays as it is."""
    if not isinstance(number, (int, float)):
        return number
    carrier = CarryingInt(number) if isinstance(number, int) else CarryingFloat(number)
    carrier.origin = origin
    return carrier


def plain(number: Any) -> Any:
    """The same number without an origin."""
    if isinstance(number, CarryingInt):
        return int(number)
    return float(number) if isinstance(number, CarryingFloat) else number


def origin_of(*numbers: Any) -> Origin | None:
    """The first origin that one of these numbers has."""
    for number in numbers:
        if isinstance(number, (CarryingInt, CarryingFloat)):
            return number.origin
    return None


def origin_of_loader(loader: Any) -> Origin | None:
    """What any loader was made from; None: not from one of dpex's."""
    return origin_of(*(getattr(loader, name, None) for name in _CARRIERS))


def options_among(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """dpex's options among the arguments of a call."""
    return {name: arguments[name] for name in OPTION_NAMES}


def inherited(given: Mapping[str, Any], origin: Origin | None) -> dict[str, Any]:
    """dpex's options as they were given; those that were left out are the origin's, where there is one."""
    if origin is None:
        return dict(given)
    return {
        name: origin.options.get(name, value) if value == DEFAULTS[name] else value for name, value in given.items()
    }
