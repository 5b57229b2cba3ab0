"""The record of a run: the file's name, and facts about this process. The tuner's thread alone writes."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dpex
from dpex.autotune.config import AutotuneConfig
from dpex.autotune.runtime.trace_file import TraceFile, problem_of
from dpex.autotune.trace import Header, Recorder
from dpex.errors import OptionError
from dpex.system.cpus import local_ranks, rank, usable_cpus

VARIABLE = "DPEX_TRACE"


def wanted(config: AutotuneConfig, environ: Mapping[str, str]) -> Path | None:
    """The file asked for, absolute, with ``{pid}`` and ``{rank}`` filled in; None: nothing is to be recorded."""
    name = config.trace or environ.get(VARIABLE)
    if not name:
        return None
    name = name.replace("{pid}", str(os.getpid())).replace("{rank}", str(rank(environ)))
    return Path(name).expanduser().absolute()


def check(config: AutotuneConfig, environ: Mapping[str, str]) -> None:
    """Refuse what cannot be written to, before training begins.

    Raises:
        OptionError: the name is that of a folder or device, or its folder is not there or not to be written to.
    """
    try:
        path = wanted(config, environ)
        problem = None if path is None else problem_of(path)
    except (OSError, RuntimeError, ValueError) as error:
        problem = str(error)
    if problem is not None:
        said = f"AutotuneConfig(trace={config.trace!r})" if config.trace else f"{VARIABLE}={environ[VARIABLE]!r}"
        raise OptionError(f"{said}: {problem}; give a file in a folder that exists and can be written to")


def header(at: float) -> Header:
    """Return the header of a run that began ``at`` seconds ago in this process."""
    torch = sys.modules.get("torch")
    machine: dict[str, Any] = {
        "name": os.uname().nodename,
        "system": f"{os.uname().sysname} {os.uname().release}",
        "python": sys.version.split()[0],
        "torch": str(torch.__version__) if torch is not None else None,
        "pid": os.getpid(),
        "rank": rank(os.environ),
        "local_ranks": local_ranks(os.environ),
        "cpus": os.cpu_count(),
        "usable_cpus": usable_cpus(),
    }
    return Header(dpex=dpex.__version__, started_s=time.time() - at, machine=machine)


def recorder(config: AutotuneConfig) -> Recorder | None:
    """Return the recorder of a new run, None if it is not to be recorded."""
    path = wanted(config, os.environ)
    return None if path is None else Recorder(TraceFile(path).write, header)
