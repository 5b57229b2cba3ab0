"""``overlap_epochs``: whether a loader's workers make the first batches of its next epoch ahead, and if not, why.

Workers that start with each epoch have the dataset as it is then. Workers that are kept have it as it was. So the next
epoch may have them only if the facts about the loader that they hold are unchanged: its attributes are the same
objects, the modes of torch are the same, dataset and collate function have the same pickled state, and so have the
global variables that their code names. If pickling takes more than a millisecond, or fails, nothing is known, and no
workers are kept.

A dataset may also change itself in a worker that reads its samples. So each worker that is kept begins the next epoch
with dataset and collate function as they were when it started (`dpex.worker.original`).
"""

from __future__ import annotations

import dis
import functools
import sys
import sysconfig
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dpex._torch import DatasetKind
from dpex.engine.next_epoch import OverlapRecord, why_unpredictable
from dpex.worker.original import PickledState, SlowError
from dpex.worker.setup import Modes, modes_here

LONGEST_S = 0.001
"""Seconds that pickling may take at the start of an epoch."""
_TRIES = 3
"""Epochs in a row in which pickling takes too long before it is given up: a single one may have been disturbed."""
_OF_THE_MOMENT = ("_IterableDataset_len_called", "_begun", "_iterator", "_pins", "_runtime", "_sizes", "_source")
"""Attributes of a loader that are not about what workers make."""
_INSTALLED = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
"""Folders of modules that are not the user's own."""
_REMEDY = "so a change between epochs would go unnoticed: give persistent_workers=True"


def overlap_of(loader: Any, *, has_feed: bool) -> OverlapRecord:
    """Return where the loader's predictions are recorded. It says why there can be none, if so."""
    runtime = loader._runtime
    if runtime.overlap is None:
        runtime.overlap = OverlapRecord()
    record: OverlapRecord = runtime.overlap
    record.why_not = _why_not(loader, has_feed=has_feed) or record.why_given_up
    if not record.why_not and not loader.persistent_workers:
        record.why_not = record.why_unknown
    return record


def _why_not(loader: Any, *, has_feed: bool) -> str:
    if loader._dataset_kind == DatasetKind.Iterable:
        return "an iterable dataset decides itself what its next epoch is"
    if loader.seeding != "batch":
        return "under seeding='worker' the random numbers of an epoch continue those of the one before"
    if loader.worker_config.share is not None:
        return "batches are shared with other trainings, which may be in other epochs"
    if type(loader).local_pool is not None:
        return f"{type(loader).__name__}.local_pool makes its workers"
    if loader.sample_policy.is_on:
        return "samples that fail in batches made ahead would count although they may be dropped"
    if not loader.persistent_workers and has_feed:
        return "batches for a device need persistent_workers=True"
    if not loader.persistent_workers and loader.worker_init_fn is not None:
        return "worker_init_fn is to be called in each epoch: give persistent_workers=True"
    return why_unpredictable(loader._index_sampler)


# -- facts that workers hold -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Facts:
    """See the module.

    Attributes:
        attributes: Those of the loader that its workers depend on, by name.
        modes: torch's modes.
        state: The state of dataset and collate function.
        variables: Global variables of the user's modules that their code reads, by module and name.
    """

    attributes: dict[str, Any]
    modes: Modes
    state: PickledState
    variables: dict[tuple[str, str], Any]

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Facts)
            and self.modes == other.modes
            and self.state == other.state
            and _are_same(self.attributes, other.attributes)
            and _are_same(self.variables, other.variables)
        )

    __hash__ = None  # type: ignore[assignment]


def facts_of(loader: Any, record: OverlapRecord) -> Facts | None:
    """Return the facts about a loader; None if they cannot be known, for the reason that ``record`` receives."""
    kind = type(loader.dataset).__name__
    try:
        state = PickledState(loader.dataset, loader.collate_fn, most_s=LONGEST_S)
    except SlowError:
        record.slow += 1
        if record.slow >= _TRIES:
            record.why_not = record.why_unknown = f"{kind} takes more than a millisecond to pickle, {_REMEDY}"
        return None
    except Exception as error:
        record.why_not = record.why_unknown = f"{kind} cannot be pickled ({error!r}), {_REMEDY}"
        return None
    record.slow = 0
    attributes = {name: value for name, value in vars(loader).items() if name not in _OF_THE_MOMENT}
    return Facts(attributes, modes_here(), state, _variables(state.code))


def _are_same(some: Mapping[Any, Any], others: Mapping[Any, Any]) -> bool:
    """Return True if all values are the same objects, or equal numbers or strings."""
    return some.keys() == others.keys() and all(_is_same(value, others[name]) for name, value in some.items())


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (isinstance(one, (int, float, str)) and type(one) is type(other) and one == other)


def _variables(code: Iterable[type | types.FunctionType]) -> dict[tuple[str, str], Any]:
    """Return the global variables that classes and functions of the user's modules read, and those that they call."""
    found: dict[tuple[str, str], Any] = {}
    waiting, seen = list(code), set()
    while waiting:
        one = waiting.pop()
        if id(one) in seen or _is_installed(one.__module__):
            continue
        seen.add(id(one))
        waiting += one.__mro__[1:] if isinstance(one, type) else ()
        for function in vars(one).values() if isinstance(one, type) else (one,):
            if isinstance(function, (staticmethod, classmethod)):
                function = function.__func__
            elif isinstance(function, property):
                function = function.fget
            if isinstance(function, types.FunctionType):
                known = function.__globals__
                values = {name: known[name] for name in _read_by(function.__code__) if name in known}
                waiting += [value for value in values.values() if isinstance(value, (type, types.FunctionType))]
                found |= {(function.__module__, name): value for name, value in values.items()}
    return found


@functools.cache
def _is_installed(module: str) -> bool:
    """Return True for a module of Python or of a package that is installed: it is not the user's script or project."""
    file = getattr(sys.modules.get(module), "__file__", None)
    return module != "__main__" and (file is None or file.startswith(_INSTALLED))


@functools.lru_cache(maxsize=1024)
def _read_by(code: types.CodeType) -> frozenset[str]:
    """Return the names of global variables that code reads."""
    inner = [_read_by(part) for part in code.co_consts if isinstance(part, types.CodeType)]
    return frozenset(one.argval for one in dis.get_instructions(code) if one.opname == "LOAD_GLOBAL").union(*inner)
