"""``dpex bench``: one dataset alone, in one thread; what its samples cost, step by step, and what workers it needs."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from dpex.cli import subcommand
from dpex.system.user_warnings import forgive

STEPS_S = (0.005, 0.020, 0.100)
_DESCRIPTION = """
Measure a dataset alone, in one thread of this process: what a sample costs, by step and by transform, and what that
means for the number of workers. TARGET is an object of a module: a dataset, a DataLoader, or a function or class that
gives one when it is called without arguments.
"""
_EPILOG = """\
examples:
  dpex bench my_package.data:train_set --batch-size 64
  dpex bench data:make_dataset --step-ms 12 --seconds 20 --json
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    summary = "measure a dataset alone, and what workers it needs"
    parser = subcommand.add(subparsers, "bench", summary=summary, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("target", metavar="TARGET", help="module:attribute")
    parser.add_argument(
        "--batch-size", type=_count, metavar="N", help="samples in a batch (default: the DataLoader's, else 32)"
    )
    parser.add_argument("--collate", metavar="TARGET", help="module:function (default: the DataLoader's, else torch's)")
    parser.add_argument("--seconds", type=_positive, default=10.0, help="how long to measure (default: 10)")
    parser.add_argument(
        "--step-ms",
        type=_positive,
        action="append",
        metavar="MS",
        help="milliseconds of a training step; may be repeated",
    )
    parser.add_argument("--json", action="store_true", help="print JSON: times in seconds, sizes in bytes")
    parser.set_defaults(command=_command)


def _command(given: argparse.Namespace) -> int:
    from dpex.cli.bench.forecast import need
    from dpex.cli.bench.measure import BenchError, measure
    from dpex.cli.bench.report import as_json, as_text
    from dpex.cli.bench.target import subject

    try:
        if "" not in sys.path:
            sys.path.insert(0, str(Path.cwd()))
        found = subject(given.target, given.batch_size, given.collate)
        measured = measure(found, given.seconds)
    except BenchError as error:
        print(f"dpex bench: {error}", file=sys.stderr)
        return 2
    work = measured.work()
    needs = [need(work, step_s) for step_s in ([ms / 1e3 for ms in given.step_ms] if given.step_ms else STEPS_S)]
    show = as_json if given.json else as_text
    forgive(sys.stdout)
    print(show(found, measured, work, needs))
    return 0


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1")
    return int(text)


def _positive(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = 0.0
    if not 0.0 < number < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return number
