"""A subcommand whose help begins with a description and ends with examples."""

from __future__ import annotations

import argparse
import textwrap
from typing import Any

COLUMNS = 80
"""Help is read in terminals, and many are no wider."""


def add(subparsers: Any, name: str, *, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """Add it, and return its parser. summary: its line in the help of ``dpex`` itself."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        name,
        help=summary,
        description=textwrap.fill(description.strip(), COLUMNS),
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser
