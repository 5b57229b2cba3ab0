"""Keep torch.compile from tracing dpex, just as it does not trace torch's own loader.

torch skips its own files by their names. Other code must test in each function whether it is being traced
(`is_dynamo_compiling`). `torch.compiler.disable` imports the compiler, which takes seconds, so it is called only while
a function is traced.

`dpex run` imports this module while torch is being imported, so torch's attributes are read only within calls.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import TypeVar

import torch

C = TypeVar("C", bound=type)
F = TypeVar("F", bound=Callable[..., object])


def untraced(function: F) -> F:
    """Return ``function`` such that torch.compile runs it, and all that it calls, as plain Python."""

    @functools.wraps(function)
    def call(*args: object, **options: object) -> object:
        if torch.compiler.is_dynamo_compiling():
            return torch.compiler.disable(function)(*args, **options)
        return function(*args, **options)

    return call  # type: ignore[return-value]


def never_traced(owner: C) -> C:
    """Have torch.compile run all methods and properties of a class as plain Python."""
    for name, member in list(vars(owner).items()):
        if inspect.isfunction(member):
            setattr(owner, name, untraced(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(owner, name, member.getter(untraced(member.fget)))
    return owner
