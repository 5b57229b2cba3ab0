"""The base class of `dpex.DpexDataLoader`: torch's loader, dpex's options, and the attributes that its parts use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Protocol, TypeVar

from torch.utils.data import DataLoader

from dpex.options import LoaderOptions

if TYPE_CHECKING:
    from dpex._torch import BaseDataLoaderIter
    from dpex.loader.runtime import LoaderRuntime
    from dpex.loader.streams import Streams
    from dpex.measure.settings import Settings
    from dpex.pools.base import MakesPool

T_co = TypeVar("T_co", covariant=True)


class Samples(Protocol[T_co]):
    """A dataset that is no `torch.utils.data.Dataset`, such as a list or a range: it has a sample for each index."""

    def __getitem__(self, index: Any, /) -> T_co: ...


class BaseLoader(LoaderOptions, DataLoader[T_co]):
    """A loader as the modules of this folder see it. `dpex.DpexDataLoader` sets the attributes.

    Attributes:
        local_pool: See `dpex.DpexDataLoader.local_pool`.
        in_order: torch's ``in_order``, which dpex supports also before torch 2.6.
    """

    local_pool: ClassVar[MakesPool | None]
    in_order: bool
    _begun: BaseDataLoaderIter | None = None
    """An iterator that `state_dict` has made, and that the next ``iter()`` returns."""
    _is_auto: bool
    """True if ``num_workers="auto"`` was given, and no number has been assigned since."""
    _chosen: int | None
    """The number of workers that dpex chose, before anything was measured."""
    _streams: Streams | None
    """The number of streams of an iterable dataset under ``num_workers="auto"``."""
    _settings: Settings | None
    """The settings that the latest `resize` of an untuned loader has set; None before the first."""
    _pins: dict[str, int]
    """Values that `resize` fixed, by the name of the setting."""
    _runtime: LoaderRuntime
