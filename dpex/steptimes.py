"""Times the transforms of a dataset where they are, for one batch now and then.

For such a batch the classes of the transforms, and of datasets within the dataset, get a ``__call__``
(``__getitem__``) that books the calls of these very objects in this thread and passes on all others; functions in lists
and attributes are replaced by objects that do. No object's class changes, none is copied, so state, random numbers and
batches are those of an untimed batch. All of it is undone when the batch is made or has failed, and in a process that
is forked meanwhile. A process times one batch at a time: another thread that would like to takes a later one.

`TicketTimer` belongs to one thread. What a batch is not timed for costs one comparison with `TicketTimer.due`.
"""

from __future__ import annotations

import math
import os
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset

from dpex.sampling import Occasions
from dpex.spans import Book, Step
from dpex.steps import holds_datasets, is_step, is_steps, label, labelled

Row = tuple[str, int, float, float]
"""A step: its name, calls, and wall and CPU seconds in them without the steps within; "a > b" is step b within a."""
COLLATE = "collate"
MOST_ROWS = 64
"""Of one batch: the costliest. What others took counts as the dataset's own."""
SWITCH = "DPEX_TIME_TRANSFORMS"
"""Environment variable; "0": transforms are never timed."""
_COLLATE_HERE = "\0collate"
_CALLS_TRIED = 16
_BESIDE = 1.5
"""What passing through a replaced method takes, in proportion to booking the call."""
_one_at_a_time = threading.Lock()
_current: _Session | None = None


def is_switched_on(environ: Any) -> bool:
    """Whether transforms may be timed."""
    return bool(environ.get(SWITCH, "") != "0")


class TicketTimer:
    """See the module. Around a batch that began at ``due`` or later: `begin`, `collating` and, in any case, `end`."""

    def __init__(self, *, is_on: bool = True, clock: Callable[[], float] = time.perf_counter) -> None:
        self._occasions = Occasions()
        self._clock = clock
        self._session: _Session | None = None
        self._began_s = 0.0
        self._steps: tuple[Step, ...] = ()
        self.due = 0.0 if is_on else math.inf

    @property
    def taken(self) -> int:
        """Batches timed so far."""
        return self._occasions.taken

    def begin(self, now: float, dataset: Any) -> bool:
        """Whether the batch that begins now is timed."""
        occasions = self._occasions
        if not occasions.comes(now):
            self.due = occasions.due
            return False
        _prepare_for_forks()
        if not _one_at_a_time.acquire(blocking=False):
            return False
        try:
            self._session = _Session(dataset)
        except BaseException as error:
            _one_at_a_time.release()
            occasions.took(now, self._clock() - now)
            self.due = occasions.due
            if not isinstance(error, Exception):  # its attributes cannot be looked at, now or ever
                raise
            return False
        self.due = math.inf
        self._steps = ()
        self._began_s = self._clock() - now
        return True

    def collating(self, collate_fn: Callable[[Any], Any], data: Any) -> Any:
        """``collate_fn(data)``, told apart from what the dataset does."""
        assert self._session is not None
        return self._session.book.call(_COLLATE_HERE, collate_fn, data)

    def end(self) -> None:
        """All is as it was; idempotent."""
        session, self._session = self._session, None
        if session is None:
            return
        began = self._clock()
        try:
            session.end()
        finally:
            _one_at_a_time.release()
        self._steps = session.book.spans().steps
        calls_s = sum(step.calls for step in self._steps) * call_s() * _BESIDE
        now = self._clock()
        self._occasions.took(now, self._began_s + now - began + calls_s)
        self.due = self._occasions.due

    def rows(self, dataset: Any, times: tuple[float, float, float, float, int]) -> tuple[Row, ...]:
        """What the batch that was timed last took, of which the stages are `dpex.worker.Stages`."""
        load_s, collate_s, load_cpu_s, collate_cpu_s, samples = times
        own = _method(dataset)
        rows: list[Row] = []
        in_collate: list[Row] = []
        for step in self._steps:
            is_collate = step.path[0] == _COLLATE_HERE
            names = (COLLATE, *step.path[1:]) if is_collate else (own, *step.path)
            (in_collate if is_collate else rows).append(
                (" > ".join(names), step.calls, step.own_wall_s, step.own_cpu_s)
            )
        rows.sort(key=lambda row: -row[2])
        del rows[MOST_ROWS:], in_collate[MOST_ROWS:]
        load_s -= sum(row[2] for row in rows)
        load_cpu_s -= sum(row[3] for row in rows)
        if not in_collate:
            in_collate = [(COLLATE, 1, collate_s, collate_cpu_s)]
        return (own, samples, max(0.0, load_s), max(0.0, load_cpu_s)), *rows, *in_collate


def _method(dataset: Any) -> str:
    if isinstance(dataset, IterableDataset):
        return f"{label(dataset)}.__iter__"
    return f"{label(dataset)}.__getitem{'s' if callable(getattr(dataset, '__getitems__', None)) else ''}__"


@cache
def call_s() -> float:
    """What booking a call costs here: the clocks are system calls, dear in some containers."""
    book = Book()
    began = time.perf_counter()
    for _ in range(_CALLS_TRIED):
        book.call("nothing", int)
    return (time.perf_counter() - began) / _CALLS_TRIED


class _Session:
    """One batch that is timed; ended by `end`, from any thread."""

    def __init__(self, dataset: Any) -> None:
        self.book = Book()
        self.thread = threading.get_ident()
        self._labels: dict[int, str] = {}
        self._known: list[Any] = [dataset]
        self._patched: set[tuple[Any, str]] = set()
        self._undo: list[Callable[[], None]] = []
        global _current
        _current = self
        try:
            self._parts(dataset, datasets=True)
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """Undo everything; idempotent."""
        global _current
        self.thread = 0
        while self._undo:
            self._undo.pop()()
        self._labels.clear()
        self._known.clear()
        if _current is self:
            _current = None

    def __reduce__(self) -> tuple[Any, ...]:
        """A class that is pickled by value meanwhile, with its methods, gets one that times nothing."""
        return _ended, ()

    def booked(self, thing: Any, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call it, and book that if it is this thread's and the object one of those that are timed."""
        known = self._labels.get(id(thing)) if threading.get_ident() == self.thread else None
        if known is None:
            return function(*args, **kwargs)
        return self.book.call(known if name == "__call__" else f"{known}.{name}", function, *args, **kwargs)

    # -- what is there -------------------------------------------------------------------------------------------

    def _parts(self, owner: Any, *, datasets: bool) -> None:
        """See to what is to be timed among the attributes."""
        attributes = getattr(owner, "__dict__", None)
        if type(attributes) is not dict:
            return
        modules = attributes.get("_modules") if isinstance(owner, nn.Module) else None
        if modules and isinstance(owner, nn.Sequential):
            for step, name in labelled(modules.values()):
                self._step(step, name)
        for name, value in [*attributes.items(), *(modules or {}).items()]:
            if datasets and holds_datasets(value):
                self._datasets(value)
            elif is_steps(name, value):
                self._steps(owner, name, value)
            elif is_step(name, value) and not self._step(value, label(value)):
                self._replace(attributes, name, value, _Passing(self, value, label(value)))

    def _datasets(self, value: Any) -> None:
        inner = value.values() if type(value) is dict else value if type(value) in (list, tuple) else (value,)
        for dataset in inner:
            if self._is_new(dataset, label(dataset)):
                if not isinstance(dataset, IterableDataset):
                    self._patch(type(dataset), "__getitem__")
                    self._patch(type(dataset), "__getitems__")
                self._parts(dataset, datasets=True)

    def _steps(self, owner: Any, name: str, steps: Any) -> None:
        plain = [(at, step, known) for at, (step, known) in enumerate(labelled(steps)) if not self._step(step, known)]
        if not plain or isinstance(steps, nn.ModuleList):
            return
        passing = list(steps)
        for at, step, known in plain:
            passing[at] = _Passing(self, step, known)
        if type(steps) is tuple:
            self._replace(vars(owner), name, steps, tuple(passing))
        else:
            for at, _, _ in plain:
                self._replace(steps, at, steps[at], passing[at])

    def _step(self, step: Any, name: str) -> bool:
        """See to a step by its class; False: that cannot be had, as of a function."""
        if not self._is_new(step, name):
            return True
        if not self._patch(type(step), "__call__"):
            del self._labels[id(step)]
            return False
        self._parts(step, datasets=False)
        return True

    def _is_new(self, thing: Any, name: str) -> bool:
        if id(thing) in self._labels or thing is self._known[0]:
            return False
        self._labels[id(thing)] = name
        self._known.append(thing)  # lives while its id is known
        return True

    # -- changing it, and back -----------------------------------------------------------------------------------

    def _patch(self, kind: Any, name: str) -> bool:
        """Have a class's method book; False: it has none, or the class cannot be changed."""
        if (kind, name) in self._patched:
            return True
        raw = next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)
        if raw is None:
            return False
        booking, is_own = _booking(self, kind, name, raw), name in vars(kind)
        try:
            type.__setattr__(kind, name, booking)
        except TypeError:
            return False
        self._patched.add((kind, name))

        def undo() -> None:
            if vars(kind).get(name) is booking:
                type.__setattr__(kind, name, raw) if is_own else type.__delattr__(kind, name)

        self._undo.append(undo)
        return True

    def _replace(self, holder: Any, key: Any, value: Any, passing: Any) -> None:
        """In a dict or a list, until the end; what somebody else put there meanwhile stays."""
        holder[key] = passing

        def undo() -> None:
            if type(holder) is dict:
                if holder.get(key) is passing:
                    holder[key] = value
            else:
                for at, item in enumerate(holder):
                    if item is passing:
                        holder[at] = value

        self._undo.append(undo)


def _ended() -> _Session:
    session = _Session.__new__(_Session)
    session.thread, session._labels, session._known = 0, {}, []
    return session


def _booking(session: _Session, kind: Any, name: str, raw: Any) -> Callable[..., Any]:
    """In a method's place. A method that a subclass's goes on to is booked once, as the subclass's."""

    def booking(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = raw.__get__(self, type(self)) if hasattr(raw, "__get__") else raw
        if type(self) is not kind:
            return bound(*args, **kwargs)
        return session.booked(self, name, bound, *args, **kwargs)

    return booking


class _Passing:
    """In a function's place: a call of it is booked. Other attributes are the function's, and so is its pickle."""

    def __init__(self, session: _Session, function: Callable[..., Any], name: str) -> None:
        self._dpex = session, function
        session._labels[id(self)] = name
        session._known.append(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        session, function = self._dpex
        return session.booked(self, "__call__", function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "_dpex":
            raise AttributeError(name)
        return getattr(self._dpex[1], name)

    def __reduce__(self) -> tuple[Any, ...]:
        return _itself, (self._dpex[1],)


def _itself(function: Any) -> Any:
    return function


@cache
def _prepare_for_forks() -> None:
    os.register_at_fork(after_in_child=_undo_in_child)


def _undo_in_child() -> None:
    """In a process that was forked while a batch was timed, which goes on in the parent only."""
    global _one_at_a_time
    if _current is not None:
        _current.end()
    _one_at_a_time = threading.Lock()
