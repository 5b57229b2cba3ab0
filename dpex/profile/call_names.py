"""The names of calls, and of places in code. A place in the user's own code is "(train.py:31)", relative to the working
directory. A place in an installed package or Python's library is "[PIL/Image.py:2342]", relative to that library.
"""

from __future__ import annotations

import os
import re
import sysconfig
from functools import lru_cache
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

_PYTHONS = {path for known in [sysconfig.get_path("stdlib")] for path in (known, os.path.realpath(known))}
_LIBRARY = re.compile(
    "|".join(["<frozen ", r".*/(site|dist)-packages/", *(f"{re.escape(path)}/" for path in _PYTHONS)])
)
_LONGEST = 80  # maximum characters of a name, so that tables stay readable


@lru_cache(4096)
def place(file: str, lines: int | str) -> str:
    """Return the name of a place in a file; see the module for its format. ``lines``: a number, or "first-last"."""
    if library := _LIBRARY.match(file):
        return f"[{file[library.end() :]}:{lines}]"
    return f"({file.removeprefix(f'{Path.cwd()}{os.sep}')}:{lines})"


def lines_of(code: CodeType) -> str:
    """Return the lines of a function, as `place` takes them."""
    last = max((line for _, _, line in code.co_lines() if line), default=code.co_firstlineno)
    return f"{code.co_firstlineno}-{last}"


def label_of_code(code: CodeType, owner: type | None) -> str:
    """Return the name of a function. A method is named after the class of its object, the ``owner``."""
    if owner is not None:
        return f"{owner.__name__}.{code.co_name}"[:_LONGEST]
    name: str = getattr(code, "co_qualname", code.co_name)  # Python 3.10 has no ``co_qualname``
    return name.rpartition("<locals>.")[2][-_LONGEST:]


def label_of_c(function: Any) -> str:
    """Return the name of a C function, prefixed with its module or the class of its object."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        module: Any = getattr(owner, "__name__", None) or getattr(function, "__module__", None) or "builtins"
        around = "" if module == "builtins" else module.rpartition(".")[2].lstrip("_")
    else:
        kind = owner if isinstance(owner, type) else type(owner)
        around = kind.__name__ if not kind.__name__.startswith("_") else kind.__module__.partition(".")[0]
        around = f"_thread.{around}" if kind.__module__ == "_thread" else around
    return f"{around}.{function.__name__}".lstrip(".")[:_LONGEST]
