"""``overlap_epochs``: whether a loader's workers make the first batches of its next epoch ahead, and if not, why.

Workers that start with each epoch have the dataset as it is then. Workers that are kept have it as it was. So the next
epoch may have them only if the facts about the loader that they hold are unchanged: its attributes are the same
objects, the modes of torch are the same, and dataset and collate function have the same pickled state. A function or
class that cannot be pickled is compared by identity, with the values that it is bound to. If pickling takes more than a
millisecond, or fails, nothing is known, and no workers are kept.
"""

from __future__ import annotations

import pickle
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from dpex.engine.next_epoch import OverlapRecord, why_unpredictable
from dpex.system.clock import monotonic
from dpex.worker.setup import Modes, modes_here

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.loader.sizing import Sizing

LONGEST_S = 0.001
"""Seconds that pickling may take at the start of an epoch."""
LARGEST_BYTES = 1 << 18
"""An array or tensor above this size is not pickled: copying it alone takes about that long."""
_TRIES = 3
"""Epochs in a row in which pickling takes too long before it is given up: a single one may have been disturbed."""
_OF_THE_MOMENT = ("_IterableDataset_len_called", "_begun", "_iterator", "_pins", "_runtime", "_sizes", "_source")
"""Attributes of a loader that are not about what workers make."""
_REMEDY = "so a change between epochs would go unnoticed: give persistent_workers=True"


def overlap_of(loader: Any, sizing: Sizing, feed: Feed | None) -> OverlapRecord:
    """Return where the loader's predictions are recorded. It says why there can be none, if so."""
    runtime = loader._runtime
    if runtime.overlap is None:
        runtime.overlap = OverlapRecord()
    record: OverlapRecord = runtime.overlap
    record.why_not = _why_not(loader, sizing, feed) or record.why_given_up
    if not record.why_not and not loader.persistent_workers:
        record.why_not = record.why_unknown
    return record


def _why_not(loader: Any, sizing: Sizing, feed: Feed | None) -> str:
    if sizing.is_iterable:
        return "an iterable dataset decides itself what its next epoch is"
    if loader.seeding != "batch":
        return "under seeding='worker' the random numbers of an epoch continue those of the one before"
    if loader.worker_config.share is not None:
        return "batches are shared with other trainings, which may be in other epochs"
    if type(loader).local_pool is not None:
        return f"{type(loader).__name__}.local_pool makes its workers"
    if loader.sample_policy.is_on:
        return "samples that fail in batches made ahead would count although they may be dropped"
    if not loader.persistent_workers and feed is not None:
        return "batches for a device need persistent_workers=True"
    if not loader.persistent_workers and loader.worker_init_fn is not None:
        return "worker_init_fn is to be called in each epoch: give persistent_workers=True"
    return why_unpredictable(loader._index_sampler)


# -- facts that workers hold -------------------------------------------------------------------------------------------


class _SlowError(Exception):
    """Pickling takes too long."""


@dataclass(frozen=True, eq=False)
class Facts:
    """See the module."""

    attributes: dict[str, Any]
    modes: Modes
    pickled: bytes
    by_identity: tuple[Any, ...]
    """Functions and classes that stand in ``pickled`` by their identity, which is theirs as long as they live."""

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Facts) or self.attributes.keys() != other.attributes.keys():
            return False
        same = all(_is_same(value, other.attributes[name]) for name, value in self.attributes.items())
        return same and self.modes == other.modes and self.pickled == other.pickled

    __hash__ = None  # type: ignore[assignment]


def facts_of(loader: Any, record: OverlapRecord) -> Facts | None:
    """Return the facts about a loader; None if they cannot be known, for the reason that ``record`` receives."""
    kind = type(loader.dataset).__name__
    sink = _Sink()
    pickler = _Pickler(sink)
    try:
        pickler.dump((loader.dataset, loader.collate_fn))
        sink.check()
    except _SlowError:
        record.slow += 1
        if record.slow >= _TRIES:
            record.why_not = record.why_unknown = f"{kind} takes more than a millisecond to pickle, {_REMEDY}"
        return None
    except Exception as error:
        record.why_not = record.why_unknown = f"{kind} cannot be pickled ({error!r}), {_REMEDY}"
        return None
    record.slow = 0
    attributes = {name: value for name, value in vars(loader).items() if name not in _OF_THE_MOMENT}
    return Facts(attributes, modes_here(), b"".join(sink.parts), tuple(pickler.by_identity))


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (int, float, str)) and type(one) is type(other) and one == other)


class _Sink:
    """The file of a pickler. It raises `_SlowError` once that takes too long."""

    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self._until = monotonic() + LONGEST_S

    def write(self, part: Any) -> int:
        self.check()
        self.parts.append(bytes(part))
        return len(part)

    def check(self) -> None:
        if monotonic() > self._until:
            raise _SlowError


class _Pickler(pickle.Pickler):
    def __init__(self, sink: _Sink) -> None:
        super().__init__(sink, 5)
        self._sink = sink
        self.by_identity: list[Any] = []

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (np.ndarray, torch.Tensor)) and obj.nbytes > LARGEST_BYTES:
            raise _SlowError
        self._sink.check()
        if isinstance(obj, (type, types.FunctionType)) and not _is_importable(obj):
            self.by_identity.append(obj)
            cells = getattr(obj, "__closure__", None) or ()
            defaults = getattr(obj, "__defaults__", None), getattr(obj, "__kwdefaults__", None)
            return _identity, (id(obj), [_content(cell) for cell in cells], defaults)
        return NotImplemented


def _is_importable(obj: Any) -> bool:
    return "<" not in obj.__qualname__


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return None


def _identity(*_: Any) -> None:
    """Stand in the pickle for a function or class. It is never called."""
