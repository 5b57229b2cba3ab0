"""Prints or writes diagnoses at the end of a run, where ``DPEX_DIAGNOSE`` asks for it: ``1``, or the name of a page.

In a name, ``{pid}`` and ``{rank}`` are filled in; a page whose name is taken gets a number. A loader is diagnosed
when it is closed, else when the process ends, also if it died before. Only the process that iterates says anything, and
nothing that goes wrong here ends a training run.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis
    from dpex.engine.loader_counters import LoaderCounters

logger = logging.getLogger("dpex")
VARIABLE = "DPEX_DIAGNOSE"
_watched: dict[LoaderCounters, Callable[[], Diagnosis]] = {}
_pid = 0


def is_wanted(environ: Mapping[str, str]) -> bool:
    """Whether anything is to be said at the end."""
    return environ.get(VARIABLE, "") not in ("", "0")


def watch(book: LoaderCounters, diagnosis: Callable[[], Diagnosis], environ: Mapping[str, str]) -> None:
    """Have what is in this book diagnosed at the end, if that is wanted."""
    global _pid
    if not is_wanted(environ):
        return
    if _pid != os.getpid():
        _pid = os.getpid()
        _watched.clear()
        atexit.register(_report_all)
    _watched[book] = diagnosis


def report(book: LoaderCounters) -> None:
    """Diagnose it now, if it is watched and was not yet."""
    diagnosis = _watched.pop(book, None)
    if diagnosis is None or _pid != os.getpid():
        return
    try:
        _show(diagnosis(), os.environ.get(VARIABLE, ""))
    except Exception as error:
        logger.warning("%s: no diagnosis: %s", VARIABLE, error)


def _show(diagnosis: Diagnosis, wanted: str) -> None:
    if wanted in ("", "0", "1"):
        print(diagnosis, file=sys.stderr)
        return
    path = diagnosis.write_html(free_path(wanted, diagnosis.facts.rank))
    print(f"dpex: {diagnosis.verdict.sentence} More in {path}", file=sys.stderr)


def free_path(name: str, rank: int) -> Path:
    """The file of that name, ``{pid}`` and ``{rank}`` filled in, with a number if it is taken."""
    name = name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank))
    path = wanted = Path(name).expanduser()
    number = 1
    while path.exists():
        number += 1
        path = wanted.with_name(f"{wanted.stem}-{number}{wanted.suffix}")
    return path


def _report_all() -> None:
    for book in list(_watched):
        report(book)
