"""Prints or writes diagnoses at the end of a run, where ``DPEX_DIAGNOSE`` asks for it: ``1``, or the name of a page.

In a name, ``{pid}`` and ``{rank}`` are filled in; a second loader's page gets a number. Each loader is diagnosed once:
when it is closed, when it dies, or when the process ends. Only the process that iterates says anything, and nothing
that goes wrong here ends a training run.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger("dpex")
VARIABLE = "DPEX_DIAGNOSE"
_watched: weakref.WeakSet[Any] = weakref.WeakSet()
_pid = 0


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether anything is to be said at the end."""
    return environ.get(VARIABLE, "") not in ("", "0")


def watch(loader: Any, environ: Mapping[str, str]) -> None:
    """Have this loader diagnosed at the end, if that is wanted."""
    global _pid
    if not is_wanted(environ):
        return
    if _pid != os.getpid():
        _pid = os.getpid()
        _watched.clear()
        atexit.register(_report_all)
    _watched.add(loader)


def report(loader: Any) -> None:
    """Diagnose it now, if it is watched and was not yet."""
    if _pid != os.getpid() or loader not in _watched:
        return
    _watched.discard(loader)
    try:
        diagnosis = loader.diagnose()
        wanted = os.environ.get(VARIABLE, "")
        if wanted in ("", "0", "1"):
            print(diagnosis, file=sys.stderr)
        else:
            path = diagnosis.write_html(_free(wanted, diagnosis.facts.rank))
            print(f"dpex: {diagnosis.verdict.sentence} More in {path}", file=sys.stderr)
    except Exception as error:
        logger.warning("%s: no diagnosis: %s", VARIABLE, error)


def _free(name: str, rank: int) -> Path:
    name = name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank))
    path = wanted = Path(name).expanduser()
    number = 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path


def _report_all() -> None:
    for loader in list(_watched):
        report(loader)
