"""``dpex diagnose``: an unmodified script with PyTorch's own loaders, measured as they are."""

from __future__ import annotations

import argparse
import atexit
import os
import sys
from pathlib import Path
from typing import Any

from dpex.cli import subcommand
from dpex.cli.run import is_readable
from dpex.run.install import ROOT, begin, has_counted
from dpex.run.options import DiagnoseOptions
from dpex.run.run_script import run_module, run_script

_DESCRIPTION = """
Run a Python script (or -m module) as python would, with PyTorch's own loaders in it, and say at the end why training
waits for data, if it does, what to do first, and what would end the wait. Processes that the script starts are measured
as well.
"""
_EPILOG = """\
The batches are PyTorch's, made by its own iterators and workers. After the run,
the transforms of the loader that took most of the time are timed, in at most 64
batches and for about 5 s. Its dataset is kept until then. --no-probe leaves
that out.

examples:
  dpex diagnose train.py --epochs 1
  dpex diagnose --html report.html -m package.train
  torchrun --nproc-per-node 2 --no-python \\
      dpex diagnose --json "report-{rank}.json" train.py
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    summary = "run a script as it is, and say why it waits for data"
    parser = subcommand.add(subparsers, "diagnose", summary=summary, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--html", metavar="FILE", help="write the report as a page; see --json")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report as JSON; {rank} and {pid} are filled in, and without {rank} only rank 0 writes",
    )
    parser.add_argument("--full", action="store_true", help="print all tables, not one screen")
    parser.add_argument("--no-probe", action="store_true", help="do not time transforms after the run")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument(
        "script", metavar="SCRIPT", nargs=argparse.PARSER, help="a Python file, followed by arguments of its own"
    )
    parser.set_defaults(command=_diagnose)


def _diagnose(given: argparse.Namespace) -> int:
    words = given.script[1:] if given.script[0] == "--" else given.script
    options = DiagnoseOptions(
        html=_absolute(given.html),
        json=_absolute(given.json),
        full=given.full,
        probe=not given.no_probe,
        again=("-m", *words) if given.is_module else tuple(words),
        prefix=sys.prefix,
        root=ROOT,
    )
    script, *arguments = words
    if not given.is_module and not is_readable(script, "dpex diagnose"):
        return 2
    atexit.register(_say_if_nothing_was_seen, os.getpid())
    begin(options, os.environ)
    (run_module if given.is_module else run_script)(script, arguments)
    return 0


def _absolute(name: str | None) -> str | None:
    return None if name is None else str(Path(name).expanduser().absolute())


def _say_if_nothing_was_seen(pid: int) -> None:
    if os.getpid() == pid and not has_counted():
        print("dpex diagnose: no DataLoader was iterated in this process", file=sys.stderr)
