"""Runs one script on two loader classes and compares all that a user could notice.

A *script* is a function `script(cls, **case)` which builds loaders of class `cls`, uses them and returns what
it saw; `@parity` makes a pytest test of it. Compared are the returned values (types, dtypes, strides, bits),
exceptions recorded with `caught` or `drain` (text and type; an error of dpex's own counts as the built-in one that
it also is), warnings (category, text, and whether they point at the user's line), and the state of `random`,
`numpy.random` and torch's global generator afterwards. Not compared: process ids, addresses, line numbers, the
library's own frames in a traceback, the names of loader and iterator classes, and the class of the default
``prefetch_factor``, an int.

Invariants: a script that fails on torch's class is a broken script, never a pass; both runs start from the
same random state.

`DPEX_PARITY_CLASS=module:Name` points the suite at another class.
"""

import contextlib
import functools
import gc
import importlib
import inspect
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from dpex.loader.sizing import LeftOut

Loader: TypeAlias = Any  # a class; scripts give it on purpose what its types forbid
Script: TypeAlias = Callable[..., Any]

HERE = Path(__file__).parent
SEED = 20260
MOST_ITEMS = 1_000
WORKERS = pytest.mark.parametrize("workers", [0, 2])
PASSES = pytest.mark.parametrize(("workers", "persistent"), [(0, False), (2, False), (2, True)])


def candidate() -> Loader:
    """The class under test."""
    module, name = os.environ.get("DPEX_PARITY_CLASS", "dpex:DpexDataLoader").split(":")
    loader: Loader = getattr(importlib.import_module(module), name)
    return loader


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """All that a script let its user notice, as plain comparable values."""

    value: Any
    error: Any
    warnings: tuple[tuple[str, str, str], ...]
    random_state: dict[str, str]


@dataclass(frozen=True)
class Caught:
    """An exception that a script met and kept; compared by type and text."""

    error: BaseException


def caught(call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What `call` returns, or the exception it raises, as a value."""
    try:
        return call(*args, **kwargs)
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        return Caught(error.with_traceback(None))


def drain(iterator: Iterator[Any], most: int = MOST_ITEMS) -> list[Any]:
    """Everything the iterator gives, each exception at its position, until it ends."""
    seen: list[Any] = []
    for _ in range(most):
        item = caught(next, iterator)
        if isinstance(item, Caught) and type(item.error) is StopIteration:
            return seen
        seen.append(item)
    raise AssertionError(f"the iterator did not end after {most} items")


def outcome(script: Script, cls: Loader, **case: Any) -> Outcome:
    """Runs the script on the class from a fixed random state."""
    seed_everything()
    value = error = None
    with said_every_time(), warnings.catch_warnings(record=True) as caught_warnings:
        warnings.simplefilter("always")
        try:
            value = normal(script(cls, **case))
        except Exception as exception:
            error = normal(Caught(exception))
        state = random_state()
        gc.collect()
    return Outcome(value=value, error=error, warnings=tuple(normal_warnings(caught_warnings)), random_state=state)


@contextlib.contextmanager
def said_every_time() -> Iterator[None]:
    """Lets torch's C++ side repeat its warnings; else only the first of the two runs would show them."""
    before = torch.is_warn_always_enabled()
    torch.set_warn_always(True)
    try:
        yield
    finally:
        torch.set_warn_always(before)


def assert_same(script: Script, cls: Loader | None = None, **case: Any) -> None:
    """Fails with the first differences if torch's class and `cls` (default: the candidate) part ways."""
    expected = outcome(script, DataLoader, **case)
    assert expected.error is None, f"the script itself fails on torch's class: {expected.error}"
    actual = outcome(script, cls or candidate(), **case)
    found = list(differences(vars(expected), vars(actual)))
    assert not found, "torch and the class under test differ:\n" + "\n".join(found[:8])


def parity(script: Script) -> Callable[..., None]:
    """Decorator: the pytest test that the script has one outcome on both classes."""

    @functools.wraps(script)
    def test(**case: Any) -> None:
        assert_same(script, **case)

    parameters = list(inspect.signature(script).parameters.values())[1:]
    test.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]  # pytest reads it
    return test


def seed_everything(seed: int = SEED) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def random_state() -> dict[str, str]:
    """One short name for the state of each global generator."""
    numpy_state: Any = np.random.get_state()
    return {
        "random": digest(repr(random.getstate()).encode()),
        "numpy": digest(numpy_state[1].tobytes() + repr(numpy_state[2:]).encode()),
        "torch": digest(torch.get_rng_state().numpy().tobytes()),
    }


def digest(data: bytes) -> str:
    import hashlib

    return hashlib.blake2b(data, digest_size=6).hexdigest()


# --- values as plain comparable trees


def normal(value: Any) -> Any:
    """The value as nested tuples, lists and dicts of plain objects, with all that must be equal."""
    if value is None or (isinstance(value, (bool, int, bytes)) and type(value).__module__ == "builtins"):
        return value
    for kinds, form in FORMS:
        if isinstance(value, kinds):
            return form(value)
    if hasattr(value, "__dict__"):
        return (name_of(type(value)), normal(vars(value)))
    return (name_of(type(value)), normal_text(repr(value)))


def name_of(kind: type) -> str:
    return normal_text(f"{kind.__module__}.{kind.__qualname__}")


def normal_tensor(t: torch.Tensor) -> Any:
    head = (name_of(type(t)), str(t.dtype), str(t.device), tuple(t.shape), t.requires_grad)
    if t.layout is torch.sparse_coo:
        return (*head, "sparse", t.is_coalesced(), normal(t._indices()), normal(t._values()))
    if t.layout is torch.sparse_csr:
        return (*head, "csr", normal(t.crow_indices()), normal(t.col_indices()), normal(t.values()))
    plain = t.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format).reshape(-1)
    shown = plain[:12].tolist()
    return (*head, t.stride(), t.is_conj(), repr(shown), digest(plain.view(torch.uint8).numpy().tobytes()))


def normal_array(a: np.ndarray[Any, Any]) -> Any:
    order = (a.flags.c_contiguous, a.flags.f_contiguous, a.flags.writeable)
    data = normal(a.tolist()) if a.dtype.hasobject else digest(np.ascontiguousarray(a).tobytes())
    return (name_of(type(a)), a.dtype.str, a.shape, order, repr(a.ravel()[:12].tolist()), data)


def normal_caught(held: Caught) -> Any:
    text = caught(str, held.error)
    return (
        "raises",
        name_of(as_torch_names(type(held.error))),
        normal_text(text) if isinstance(text, str) else "unprintable",
    )


def as_torch_names(kind: type) -> type:
    """Of an error of dpex's own, the built-in error that it also is: what code written for torch catches."""
    return kind.__bases__[1] if kind.__module__ == "dpex.errors" and len(kind.__bases__) == 2 else kind


FORMS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (LeftOut, int),
    (str, lambda v: normal_text(v) if type(v) is str else (name_of(type(v)), normal_text(str(v)))),
    (Caught, normal_caught),
    (torch.Tensor, normal_tensor),
    (np.ndarray, normal_array),
    (np.generic, lambda v: (name_of(type(v)), v.dtype.str, repr(v))),
    ((int, float, complex), lambda v: (name_of(type(v)), repr(v))),
    ((torch.dtype, torch.Size, range, slice), repr),
    (tuple, lambda v: (name_of(type(v)), *map(normal, v))),
    (list, lambda v: [normal(x) for x in v] if type(v) is list else (name_of(type(v)), *map(normal, v), extra(v))),
    (Mapping, lambda v: {"": (name_of(type(v)), list(map(normal, v)), extra(v)), **{str(k): normal(v[k]) for k in v}}),
    ((set, frozenset), lambda v: (name_of(type(v)), sorted(map(repr, map(normal, v))))),
    (type, name_of),
    (BaseException, lambda v: normal_caught(Caught(v))),
    (torch.Generator, lambda v: ("generator", v.initial_seed(), digest(v.get_state().numpy().tobytes()))),
)


def once_only(records: list[warnings.WarningMessage]) -> Iterator[warnings.WarningMessage]:
    """Without the repeats of what torch's C++ side says once per process when not told otherwise."""
    said = set()
    for record in records:
        text = str(record.message)
        if text not in said or "Triggered internally" not in text:
            said.add(text)
            yield record


def extra(value: Any) -> Any:
    """Attributes that a container carries besides its items."""
    return normal(getattr(value, "__dict__", None))


# --- text

FRAME = re.compile(r'^  File "(?P<path>[^"]+)", line \d+, in (?P<name>.+)\n(?:    .*\n)*', re.MULTILINE)
REPLACED = (
    (re.compile(r"pid\(s\) \d+(, \d+)*"), "pid(s) N"),
    (re.compile(r"pid \d+"), "pid N"),
    (re.compile(r"0x[0-9a-f]+"), "0x"),
    (
        re.compile(r"\b_?\w*(?:Dpex|Unmarked)\w*Iter\w*\b|\b_?(?:SingleProcess|MultiProcessing|Base)DataLoaderIter\b"),
        "ITERATOR",
    ),
    (re.compile(r"\b(?:dpex\.dataloader|torch\.utils\.data\.dataloader)\.(?=\w*DataLoader|ITERATOR)"), ""),
    (re.compile(r"\bDpexDataLoader\b"), "DataLoader"),
)


def normal_text(text: str) -> str:
    """The text without what may differ: the library's traceback frames, pids, addresses, class names."""
    text = FRAME.sub(user_frame, text.replace("\\n", "\n"))  # a KeyError's text is a repr
    for pattern, name in REPLACED:
        text = pattern.sub(name, text)
    return text


def user_frame(match: re.Match[str]) -> str:
    return f"  in {match['name']}\n" if Path(match["path"]).is_relative_to(HERE) else ""


IGNORED_WARNINGS = (ResourceWarning,)


def normal_warnings(records: list[warnings.WarningMessage]) -> Iterator[tuple[str, str, str]]:
    for record in once_only(records):
        if issubclass(record.category, IGNORED_WARNINGS) or "use of fork() may lead" in str(record.message):
            continue
        place = "at the user's line" if Path(record.filename).is_relative_to(HERE) else "in the library"
        yield (record.category.__name__, normal_text(str(record.message)), place)


# --- the difference, where it is


def differences(expected: Any, actual: Any, place: str = "") -> Iterator[str]:
    """One line for each innermost place where the two trees differ."""
    if type(expected) is type(actual) and isinstance(expected, (list, tuple)) and len(expected) == len(actual):
        for i, (e, a) in enumerate(zip(expected, actual, strict=True)):
            yield from differences(e, a, f"{place}[{i}]")
    elif isinstance(expected, dict) and isinstance(actual, dict) and expected.keys() == actual.keys():
        for key, e in expected.items():
            yield from differences(e, actual[key], f"{place}.{key}" if place else str(key))
    elif type(expected) is not type(actual) or expected != actual:
        yield f"{place}\n    torch: {expected!r:.1500}\n    ours:  {actual!r:.1500}"
