"""The command ``dpex``, whose commands are modules of their own."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

COMMANDS = ("dpex.top",)
"""Modules, each with ``register(subparsers)``, whose parser sets ``run``: from the arguments to an exit status."""


def parser() -> argparse.ArgumentParser:
    """Of all commands."""
    found = argparse.ArgumentParser(prog="dpex", description="Data loading for PyTorch: look at it.")
    subparsers = found.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(name).register(subparsers)
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    options = parser().parse_args(arguments)
    try:
        return int(options.run(options))
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # whoever read this has read enough
        sys.stderr.close()
        return 141


if __name__ == "__main__":
    sys.exit(main())
