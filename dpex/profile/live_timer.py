"""Time the transforms of a dataset, their parts, and the datasets within, in some of the batches.

`dpex.profile.call_timer` times them without changing them, and reports which of them draw random numbers. State, random
numbers and batches are those of an untimed batch. A `TicketTimer` belongs to one thread. A batch that is not timed
costs one comparison with `TicketTimer.due`.

Steps are attributes that can be called and whose name holds "transform" or "augment", or that have a list of
``transforms`` (as torchvision's and albumentations' ``Compose``), ``nn.Sequential``, and the same within those.
Datasets within are attributes that are datasets, or hold nothing else (`Subset`, `ConcatDataset` and the like).
"""

from __future__ import annotations

import functools
import inspect
import math
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.data import Dataset, IterableDataset

from dpex.measure.batch_times import BatchTimes, StepRow
from dpex.measure.sampling import SamplingSchedule
from dpex.profile.call_timer import Path, StepSeconds, StepWatch, WatchedGenerators
from dpex.system.clock import monotonic

COLLATE = "collate"
MOST_ROWS = 64
"""Maximum reported steps of a batch, the costliest. The time of further steps counts as the dataset's own."""
SWITCH = "DPEX_TIME_TRANSFORMS"
"""Environment variable; "0": transforms are never timed."""
_COMPARED = frozenset((0, *(4**power for power in range(16))))
"""Timed batches in which generators are compared. This takes milliseconds, and its result is the same each time for
nearly all datasets. So it is seldom, and its cost is no reason to time fewer batches."""
_COLLATE_HERE = "\0collate"
_NAMES = ("transform", "augment")
_LONGEST = 80
"""Characters of a name: tables stay readable."""


def is_switched_on(environ: Any) -> bool:
    """Return True if transforms may be timed."""
    return bool(environ.get(SWITCH, "") != "0")


class TicketTimer:
    """See the module. Around a batch that began at ``due`` or later: `begin`, `collating` and, in any case, `end`."""

    def __init__(
        self,
        *,
        is_on: bool = True,
        clock: Callable[[], float] = monotonic,
        cpu: Callable[[], float] = time.thread_time,
        draws_of: Callable[[Any], WatchedGenerators] | None = None,
    ) -> None:
        self._cpu = cpu
        self._draws_of = draws_of
        self._occasions = SamplingSchedule()
        self._clock = clock
        self._watch: StepWatch | None = None
        self._began_s = 0.0
        self._costs_s = (0.0, 0.0)
        self._steps: dict[Path, StepSeconds] | None = None
        self._drawing: set[Path] = set()
        self.due: float = 0.0 if is_on else math.inf

    @property
    def taken(self) -> int:
        """Batches timed so far."""
        return self._occasions.taken

    def begin(self, now: float, dataset: Any) -> bool:
        """Return True if the batch that begins now is timed."""
        occasions = self._occasions
        if not occasions.comes(now):
            self.due = occasions.due
            return False
        draws_of = self._draws_of if self.taken in _COMPARED else None
        watch = watch_of(dataset, self._cpu, draws_of) if sys.getprofile() is None else None
        if watch is None or not watch.start():
            occasions.took(now, self._clock() - now)
            self.due = occasions.due
            return False
        self._watch = watch
        self.due = math.inf
        self._steps, self._costs_s = None, (0.0, 0.0)
        self._began_s = self._clock() - now
        return True

    def collating(self, collate_fn: Callable[[Any], Any], data: Any) -> Any:
        """Return ``collate_fn(data)``, timed as a step of its own."""
        watch = self._watch
        assert watch is not None
        load_cost_s = watch.cost_s
        try:
            return watch.call(_COLLATE_HERE, collate_fn, data)
        finally:
            self._costs_s = load_cost_s, watch.cost_s - load_cost_s

    def end(self) -> None:
        """End a batch that was made or has failed; idempotent."""
        watch, self._watch = self._watch, None
        if watch is None:
            return
        began = self._clock()
        watch.stop()
        self._steps, self._drawing = watch.steps if watch.is_whole else None, watch.drawing
        now = self._clock()
        self._occasions.took(now, self._began_s + now - began + watch.cost_s - watch.compared_s)
        self.due = self._occasions.due

    def finished(self, dataset: Any, times: BatchTimes) -> BatchTimes:
        """Return the times of the batch that was timed last: without what timing took, and with its steps."""
        load_cost_s, collate_cost_s = self._costs_s
        times = times._replace(
            load_s=max(0.0, times.load_s - load_cost_s),
            load_cpu_s=max(0.0, times.load_cpu_s - load_cost_s),
            collate_s=max(0.0, times.collate_s - collate_cost_s),
            collate_cpu_s=max(0.0, times.collate_cpu_s - collate_cost_s),
        )
        return times._replace(steps=self.rows(dataset, times))

    def rows(self, dataset: Any, times: BatchTimes) -> tuple[StepRow, ...]:
        """Return what the steps of the batch that was timed last took; nothing if not all of its calls were seen.

        The cost of timing is an estimate, so the steps of a stage may add up to more than the stage.
        """
        if self._steps is None:
            return ()
        own, steps = _method(dataset), self._steps
        loading = [path for path in steps if path[0] != _COLLATE_HERE]
        costliest = set(sorted(loading, key=lambda path: -steps[path][1])[:MOST_ROWS])
        rows = [self._row((own, *path), path) for path in loading if path in costliest]
        rest_s = max(0.0, times.load_s - sum(row[2] for row in rows))
        rest_cpu_s = max(0.0, times.load_cpu_s - sum(row[3] for row in rows))
        collating = [self._row((COLLATE, *path[1:]), path) for path in steps if path[0] == _COLLATE_HERE]
        if not collating:
            collating = [(COLLATE, 1, times.collate_s, times.collate_cpu_s, 0)]
        first = (own, times.samples, rest_s, rest_cpu_s, int(() in self._drawing))
        return first, *rows, *collating[:MOST_ROWS]

    def _row(self, names: Path, path: Path) -> StepRow:
        assert self._steps is not None
        calls, wall_s, cpu_s = self._steps[path]
        return " > ".join(names), calls, max(0.0, wall_s), max(0.0, cpu_s), int(path in self._drawing)


def _method(dataset: Any) -> str:
    if isinstance(dataset, IterableDataset):
        return f"{label(dataset)}.__iter__"
    return f"{label(dataset)}.__getitem{'s' if callable(getattr(dataset, '__getitems__', None)) else ''}__"


# -- which steps there are ---------------------------------------------------------------------------------------------


def _is_steps(name: str, value: Any) -> bool:
    """A list of callables by one of the names, such as a ``Compose``'s."""
    if not any(part in name.lower() for part in _NAMES) or not isinstance(value, (list, tuple, nn.ModuleList)):
        return False
    return type(value) in (list, tuple, nn.ModuleList) and len(value) > 0 and all(map(callable, value))


def _is_step(name: str, value: Any) -> bool:
    """A callable by one of the names, or with a list of ``transforms``."""
    if not callable(value) or isinstance(value, (type, Dataset)):
        return False
    if any(part in name.lower() for part in _NAMES):
        return True
    held = value._modules.get("transforms") if isinstance(value, nn.Module) else None
    return isinstance(held or inspect.getattr_static(value, "transforms", None), (list, tuple, nn.ModuleList))


def _holds_datasets(value: Any) -> bool:
    """A dataset, or a list or dict of nothing but datasets."""
    if type(value) in (list, tuple):
        return bool(value) and all(isinstance(item, Dataset) for item in value)
    if type(value) is dict:
        return bool(value) and all(isinstance(item, Dataset) for item in value.values())
    return isinstance(value, Dataset)


def label(step: Any) -> str:
    """Return the name of a step: of a function, or of a class."""
    if isinstance(step, functools.partial):
        return label(step.func)
    name = getattr(step, "__name__", None)
    return (name if isinstance(name, str) else type(step).__name__)[:_LONGEST]


def labels(steps: Iterable[Any]) -> list[str]:
    """Return the label of each step; steps of the same name get numbers."""
    names = list(map(label, steps))
    before = [names[:at].count(name) for at, name in enumerate(names)]
    return [f"{name} #{count + 1}" if count else name for name, count in zip(names, before, strict=True)]


def watch_of(
    dataset: Any, cpu: Callable[[], float], draws_of: Callable[[Any], WatchedGenerators] | None = None
) -> StepWatch | None:
    """Return a watch for all steps of a dataset; None if reading its attributes raises an error."""
    try:
        watch = StepWatch(cpu=cpu, draws=draws_of(dataset) if draws_of else None)
        _TransformFinder(dataset, watch)
    except Exception:
        return None
    return watch


class _TransformFinder:
    """Visits the steps of a dataset, each once."""

    def __init__(self, dataset: Any, watch: StepWatch) -> None:
        self._watch = watch
        self._seen: dict[int, Any] = {id(dataset): dataset}
        self._parts(dataset, datasets=True)

    def _parts(self, owner: Any, *, datasets: bool) -> None:
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict:
            return
        modules = attributes.get("_modules") if isinstance(owner, nn.Module) else None
        if modules and isinstance(owner, nn.Sequential):
            self._all(modules.values())
        for name, value in [*attributes.items(), *(modules or {}).items()]:
            if datasets and _holds_datasets(value):
                self._datasets(value)
            elif _is_steps(name, value):
                self._all(value)
            elif _is_step(name, value):
                self._step(value, label(value))

    def _datasets(self, value: Any) -> None:
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for dataset in inner:
            if self._is_new(dataset):
                if not isinstance(dataset, IterableDataset):
                    for name in ("__getitem__", "__getitems__"):
                        self._watch.add_method(dataset, name, f"{label(dataset)}.{name}")
                self._parts(dataset, datasets=True)

    def _all(self, steps: Any) -> None:
        steps = list(steps)
        for step, name in zip(steps, labels(steps), strict=True):
            self._step(step, name)

    def _step(self, step: Any, name: str) -> None:
        if self._is_new(step):
            self._watch.add(step, name)
            self._parts(step, datasets=False)

    def _is_new(self, thing: Any) -> bool:
        is_new = id(thing) not in self._seen
        self._seen[id(thing)] = thing  # lives while its id is known
        return is_new
