"""Where a dataset's time goes, step by step, without a change to its code or to what it yields.

`Profile.of` makes a shallow copy of a dataset in which ``__getitem__``, the transforms and the datasets within are
timed; the collate function is timed beside it. The dataset that was given, its transforms and all else stay as they
are. A copy shares what it refers to (arrays, open files, generators), and random numbers are drawn as without it.

What is found, `dpex.profile.discover` says. A method of the dataset that is no attribute of its own is part of
``__getitem__``.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Any

from torch import nn
from torch.utils.data import Dataset, IterableDataset, default_collate

from dpex.profile.discover import holds_datasets, is_step, is_steps, labelled
from dpex.profile.discover import label as label_of
from dpex.profile.spans import Book, Spans

_BOOK, _LABEL = "_dpex_book", "_dpex_label"


class Profile:
    """A dataset and a collate function that book what they do; picklable where the dataset is, without what was booked.

    dataset, collate_fn: to be used in place of those given.
    """

    def __init__(self, dataset: Any, collate_fn: Callable[[Any], Any], book: Book) -> None:
        self.dataset = dataset
        self.collate_fn = collate_fn
        self._book = book

    @classmethod
    def of(cls, dataset: Any, collate_fn: Callable[[Any], Any] = default_collate, book: Book | None = None) -> Profile:
        """Instrument a dataset, map-style or iterable."""
        book = book or Book()
        maker = _Maker(book)
        timed = maker.dataset(dataset)
        return cls(timed, maker.call("collate", maker.rebound(collate_fn)), book)

    def spans(self) -> Spans:
        """What was booked so far."""
        return self._book.spans()


class _Maker:
    """Makes timed copies; what is met twice is copied once, so that two places that shared an object still do."""

    def __init__(self, book: Book) -> None:
        self._book = book
        self._made: dict[int, tuple[Any, Any]] = {}

    def dataset(self, dataset: Any) -> Any:
        """A copy of a dataset whose samples, transforms and inner datasets are timed."""
        if id(dataset) in self._made:
            return self._made[id(dataset)][1]
        label = type(dataset).__name__
        copied = self._subclassed(dataset, label, _timed_dataset)
        if copied is None:
            copied = _DatasetProxy(dataset, self._book, label)
            self._made[id(dataset)] = dataset, copied
        return copied

    def step(self, step: Any, label: str | None = None) -> Any:
        """A copy of a callable that is timed, and so are the callables within."""
        if id(step) in self._made:
            return self._made[id(step)][1]
        label = label or label_of(step)
        plain = isinstance(step, (types.MethodType, types.FunctionType, functools.partial))
        made = None if plain else self._subclassed(step, label, _timed_callable)
        return self.call(label, self.rebound(step)) if made is None else made

    def _subclassed(self, thing: Any, label: str, make: Callable[[Any], Any]) -> Any | None:
        """A copy, of a subclass that books; None: it cannot be given another class, as a list or one with slots."""
        try:
            copied = _copied(thing)
            copied.__class__ = make(type(copied))
        except TypeError:
            return None
        self._made[id(thing)] = thing, copied
        self._parts(copied, datasets=isinstance(thing, Dataset))
        vars(copied).update({_BOOK: self._book, _LABEL: label})
        return copied

    def call(self, label: str, function: Callable[..., Any]) -> Any:
        """A callable that times another."""
        return _TimedCall(self._book, label, function)

    def rebound(self, function: Any) -> Any:
        """A method of something that was copied, bound to the copy."""
        if isinstance(function, types.MethodType) and id(function.__self__) in self._made:
            return types.MethodType(function.__func__, self._made[id(function.__self__)][1])
        return function

    def _parts(self, owner: Any, *, datasets: bool) -> None:
        """Replace what is to be timed among the attributes of a copy."""
        attributes = vars(owner)
        if isinstance(owner, nn.Module):
            attributes["_modules"] = modules = dict(attributes["_modules"])
            if isinstance(owner, nn.Sequential):
                modules.update(zip(modules, self._steps(modules.values()), strict=True))
        named = [*attributes.items(), *attributes.get("_modules", {}).items()]
        for name, value in named:
            if datasets and holds_datasets(value):
                attributes[name] = self._each(value, self.dataset)
            elif is_steps(name, value):
                attributes[name] = self._steps(value)
                if isinstance(value, tuple):
                    attributes[name] = tuple(attributes[name])
            elif is_step(name, value):
                attributes[name] = self.step(value)

    def _steps(self, steps: Iterable[Any]) -> list[Any]:
        """Each timed; those that share a name get numbers."""
        return [self.step(step, label) for step, label in labelled(steps)]

    @staticmethod
    def _each(value: Any, make: Callable[[Any], Any]) -> Any:
        if type(value) is dict:
            return {key: make(item) for key, item in value.items()}
        return type(value)(map(make, value)) if type(value) in (list, tuple) else make(value)


def _copied(thing: Any) -> Any:
    """A shallow copy that runs none of the class's own code where that can be had."""
    kind: Any = type(thing)
    if _pickles_as_usual(kind) and hasattr(thing, "__dict__") and not _has_slots(kind):
        made = object.__new__(kind)
        vars(made).update(vars(thing))
        return made
    return copy.copy(thing)


def _pickles_as_usual(kind: Any) -> bool:
    return kind.__reduce_ex__ is object.__reduce_ex__ and kind.__reduce__ is object.__reduce__


def _has_slots(kind: type) -> bool:
    return any(vars(base).get("__slots__") for base in kind.__mro__)


def _reduce(self: Any, protocol: Any) -> Any:
    """``__reduce_ex__`` of a timed copy: it pickles by the rules of its real class."""
    kind, make = type(self).__mro__[1], type(self)._dpex_make
    names = {name: vars(self)[name] for name in (_BOOK, _LABEL)}
    if _pickles_as_usual(kind):
        reduced: Any = object.__reduce_ex__(self, 2)
        return _blank, (kind, make, names), reduced[2]
    plain: Any = object.__new__(kind)
    vars(plain).update({name: value for name, value in vars(self).items() if name not in names})
    return _timed_again, (plain, make, names)


def _blank(kind: type, make: Callable[[type], type], names: dict[str, Any]) -> Any:
    thing: Any = object.__new__(make(kind))
    vars(thing).update(names)
    return thing


def _timed_again(plain: Any, make: Callable[[type], type], names: dict[str, Any]) -> Any:
    plain.__class__ = make(type(plain))
    vars(plain).update(names)
    return plain


@functools.cache
def _timed_callable(kind: Any) -> Any:
    """A subclass whose instances book their calls; for everybody else it looks like its base."""

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N807
        return vars(self)[_BOOK].call(vars(self)[_LABEL], functools.partial(kind.__call__, self), *args, **kwargs)

    return _subclass(kind, _timed_callable, {"__call__": __call__})


@functools.cache
def _timed_dataset(kind: Any) -> Any:
    """The same for samples, and for a callable dataset class too."""
    methods: dict[str, Any] = {}
    if issubclass(kind, IterableDataset):
        methods["__iter__"] = lambda self: _timed_stream(kind.__iter__(self), vars(self)[_BOOK], vars(self)[_LABEL])
    else:
        methods["__getitem__"] = lambda self, index: vars(self)[_BOOK].sample(
            f"{vars(self)[_LABEL]}.__getitem__",
            functools.partial(kind.__getitem__, self),
            index,
        )
    if callable(getattr(kind, "__getitems__", None)):
        methods["__getitems__"] = lambda self, indices: vars(self)[_BOOK].batch(
            f"{vars(self)[_LABEL]}.__getitems__",
            functools.partial(kind.__getitems__, self),
            indices,
        )
    return _subclass(kind, _timed_dataset, methods)


def _subclass(kind: Any, make: Any, methods: dict[str, Any]) -> Any:
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__doc__": kind.__doc__}
    own = {"__reduce_ex__": _reduce, "_dpex_make": staticmethod(make)}
    return type(kind)(kind.__name__, (kind,), names | methods | own)


def _timed_stream(stream: Iterator[Any], book: Book, label: str) -> Iterator[Any]:
    for number in count():
        try:
            sample = book.sample(f"{label}.__iter__", lambda _: next(stream), number)
        except StopIteration:
            return
        yield sample


class _TimedCall:
    """A callable of any kind, timed; other attributes are its own."""

    def __init__(self, book: Book, label: str, function: Callable[..., Any]) -> None:
        self._dpex = book, label, function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        book, label, function = self._dpex
        return book.call(label, function, *args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dpex":
            raise AttributeError(name)
        return getattr(self._dpex[2], name)


class _DatasetProxy:
    """A dataset whose class cannot be changed, with its samples timed."""

    def __init__(self, dataset: Any, book: Book, label: str) -> None:
        self._dpex = book, label, dataset

    def __getitem__(self, index: Any) -> Any:
        book, label, dataset = self._dpex
        return book.sample(f"{label}.__getitem__", dataset.__getitem__, index)

    def __len__(self) -> int:
        return len(self._dpex[2])

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dpex":
            raise AttributeError(name)
        return getattr(self._dpex[2], name)
