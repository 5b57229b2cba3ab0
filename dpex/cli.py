"""The command ``dpex``. Each subcommand is a module with ``register(subparsers)``, which names what is to be called."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Sequence

import dpex

COMMANDS = ("run", "bench")
"""Modules of the package, in the order of the help."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own; returns the exit status. A wrong one exits with 2."""
    parser = argparse.ArgumentParser(
        prog="dpex", description="PyTorch's DataLoader on this machine and on a Ray cluster.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"dpex {dpex.__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"dpex.{name}").register(subparsers)
    options = parser.parse_args(arguments)
    return int(options.command(options))
