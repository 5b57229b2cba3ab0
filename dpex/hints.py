"""Errors for arguments that do not exist, each with a suggestion of the argument that was meant. PURE."""

from __future__ import annotations

import difflib
import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

_MEANT = {"max_workers": "max_local", "min_workers": "min_local"}
"""Common names whose spelling is not similar to that of dpex's argument, each with this argument."""
_Init = TypeVar("_Init", bound=Callable[..., None])
_Class = TypeVar("_Class", bound=type)


def hinted(config: _Class) -> _Class:
    """Decorate a dataclass, so that its TypeError for an unknown argument suggests a known argument."""
    config.__init__ = with_hints({})(config.__init__)  # type: ignore[misc]
    return config


def with_hints(held: Mapping[str, str]) -> Callable[[_Init], _Init]:
    """Return a decorator of constructors, whose TypeError for an unknown argument then suggests a known argument.

    Args:
        held: Fields of other arguments, by name, each with its notation: "autotune=AutotuneConfig(max_local=...)".
    """

    def decorate(init: _Init) -> _Init:
        parameters = inspect.signature(init).parameters

        @functools.wraps(init)
        def init_or_hint(self: Any, /, *args: Any, **kwargs: Any) -> None:
            unknown = next((name for name in kwargs if name not in parameters), None)
            if unknown is not None:
                start = f"{type(self).__name__}.__init__() got an unexpected keyword argument {unknown!r}"
                raise TypeError(f"{start}{_hint(unknown, list(parameters)[1:], held)}")
            init(self, *args, **kwargs)

        return cast(_Init, init_or_hint)

    return decorate


def _hint(unknown: str, own: Sequence[str], held: Mapping[str, str]) -> str:
    if unknown in held:
        return f": give {held[unknown]}"
    known = {**held, **{name: f"{name}=..." for name in own}}
    meant = _MEANT.get(unknown, "")
    close = [meant] if meant in known else difflib.get_close_matches(unknown, known, n=1)
    return f": give {known[close[0]]} if you mean this one" if close else ""
