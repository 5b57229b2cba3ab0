"""The command ``dpex``. Each subcommand is a module with ``register(subparsers)``, which names what is to be called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

import dpex

COMMANDS = ("demo", "run", "top", "compare", "cluster", "replay", "cache")
"""Modules of this package, in the order of the help. None imports torch: ``dpex run`` must not, before the script."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    found = argparse.ArgumentParser(
        prog="dpex",
        description="PyTorch's DataLoader with workers that are tuned, here or on a Ray cluster, and that explain why "
        "training waits.",
        allow_abbrev=False,
    )
    found.add_argument("--version", action="version", version=f"dpex {dpex.__version__}")
    subparsers = found.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS:
        importlib.import_module(f"dpex.cli.{name}").register(subparsers)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line, by default the process's own; returns the exit status. A wrong one exits with 2."""
    options = parser().parse_args(arguments)
    try:
        return int(options.command(options))
    except BrokenPipeError:  # the reader, such as `head`, has read enough
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
