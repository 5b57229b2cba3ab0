"""``dpex demo``. Its training is in another module, because it imports torch, which ``dpex run`` must not."""

from __future__ import annotations

import argparse
import math
from typing import Any

from dpex.cli.main import add_command

SECONDS = 40.0
"""Seconds of training in all: enough for "auto" to settle."""
_DESCRIPTION = """
See num_workers="auto" find its workers. A small network is trained on files that the command makes in a temporary
folder: with "auto" from a cold start, then with PyTorch's DataLoader, then with "auto" again. It takes about a minute.
"""


def register(subparsers: Any) -> None:
    summary = "see it work, on data that it makes itself"
    parser = add_command(subparsers, "demo", summary=summary, description=_DESCRIPTION)
    parser.add_argument(
        "--seconds", type=_seconds, default=SECONDS, help=f"of training in all (default: {SECONDS:.0f})"
    )
    parser.set_defaults(command=_run_demo)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number above 0")
    return seconds


def _run_demo(options: argparse.Namespace) -> int:
    from dpex.cli.demo_training import run_demo

    return run_demo(options)
