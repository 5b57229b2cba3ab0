"""Runs a script or a module in this process as ``python script.py`` or ``python -m module`` would.

It is ``__main__``, with its own ``sys.argv`` and ``sys.path[0]``; what it raises leaves the process as it does under
Python itself, and the traceback begins with the script.
"""

from __future__ import annotations

import builtins
import importlib.machinery
import io
import os
import runpy
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType, TracebackType
from typing import Any


def run_script(path: str, arguments: Sequence[str]) -> None:
    """As ``python PATH ARGUMENTS``.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    sys.argv = [path, *arguments]
    place = os.path.abspath(path)  # noqa: PTH100  (as Python: without following links)
    with io.open_code(str(Path(path).absolute())) as file:
        source = file.read()
    _begin_path(Path(path).resolve().parent)
    loader = importlib.machinery.SourceFileLoader("__main__", place)
    main = vars(_new_main(__file__=place, __loader__=loader))
    _beginning_with_the_script(lambda: exec(compile(source, place, "exec", dont_inherit=True), main))


def run_module(name: str, arguments: Sequence[str]) -> None:
    """As ``python -m NAME ARGUMENTS``."""
    sys.argv = ["-m", *arguments]
    _begin_path(Path.cwd())
    _new_main()
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    _beginning_with_the_script(lambda: run(name))


def _begin_path(*folder: Path) -> None:
    """Put the folder where this command's own one stands, unless Python runs without one (``-P``)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = map(str, folder)


def _new_main(**attributes: Any) -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__cached__": None, "__annotations__": {}} | attributes)
    return main


def _beginning_with_the_script(run: Callable[[], object]) -> None:
    """Call, and leave the frames up to the call out of the traceback of an uncaught error."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException as error:
        _show_from(run, error)
        raise


def _show_from(run: Callable[[], object], error: BaseException) -> None:
    code = run.__code__
    hook = sys.excepthook

    def show(kind: type[BaseException], value: BaseException, traceback: TracebackType | None) -> None:
        if value is error:
            traceback = _after(traceback, code)
            value.__traceback__ = traceback
        hook(kind, value, traceback)

    sys.excepthook = show


def _after(traceback: TracebackType | None, code: Any) -> TracebackType | None:
    """The part of a traceback below the frame of that code."""
    at = traceback
    while at is not None and at.tb_frame.f_code is not code:
        at = at.tb_next
    return at.tb_next if at is not None else traceback
