"""Diagnoses at the end of a run, printed or written as ``DPEX_DIAGNOSE`` says: ``1``, or the name of a page.

In a name, ``{pid}`` and ``{rank}`` are filled in; a page whose name is taken gets a number. A loader is diagnosed
when it is closed or deleted, else when the process ends. Only the process that iterates reports, and an error here ends
no training run.
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
    """Return True if diagnoses are to be reported at the end."""
    return environ.get(VARIABLE, "") not in ("", "0")


def watch(book: LoaderCounters, diagnosis: Callable[[], Diagnosis], environ: Mapping[str, str]) -> None:
    """Have these counts diagnosed at the end, if the environment asks for it."""
    global _pid
    if not is_wanted(environ):
        return
    if _pid != os.getpid():
        _pid = os.getpid()
        _watched.clear()
        atexit.register(_report_all)
    _watched[book] = diagnosis


def report(book: LoaderCounters) -> None:
    """Report the diagnosis of these counts now, if they are watched and were not reported."""
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
    """Return the file of that name, ``{pid}`` and ``{rank}`` filled in, with a number if it is taken."""
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
