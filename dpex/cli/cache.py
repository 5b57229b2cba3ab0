"""``dpex cache``: list and remove the caches of prepared samples (`dpex.cached`) of this user on this machine."""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpex.cli.main import add_command

_DESCRIPTION = """
List or remove the caches of prepared samples that dpex.cached made on this machine: in shared memory, and in the
folders that were given as disk=.
"""
_EPILOG = """examples:
  dpex cache ls                         caches in shared memory
  dpex cache ls --disk /scratch/cache   those in this folder as well
  dpex cache rm 4c73                    the cache whose key begins so, if no process uses it
  dpex cache rm --all --disk /scratch/cache"""


_SHOWN = 12
"""Shown digits of a key: more than enough to distinguish caches."""


@dataclass(frozen=True, kw_only=True)
class _Cache:
    key: str
    where: str
    path: Path
    stored: Any
    is_used: bool


def register(subparsers: Any) -> None:
    """Add this command."""
    summary = "list and remove the caches of dpex.cached"
    found = add_command(subparsers, "cache", summary=summary, description=_DESCRIPTION, epilog=_EPILOG)
    actions = found.add_subparsers(title="actions", metavar="ls|rm", required=True)
    listing = actions.add_parser("ls", help="list caches")
    removing = actions.add_parser("rm", help="remove caches that no process uses")
    for one in (listing, removing):
        one.add_argument("--disk", metavar="DIR", type=Path, action="append", default=[], help="a folder with caches")
    removing.add_argument("key", nargs="*", help="the key of a cache, or how it begins")
    removing.add_argument("--all", action="store_true", help="all caches")
    listing.set_defaults(command=_list)
    removing.set_defaults(command=_remove)


def _caches(disks: list[Path]) -> Iterator[_Cache]:
    from dpex.cache import disk_store, memory_store

    for path, stored, is_used in memory_store.stores(memory_store.memory_folder()):
        yield _Cache(key=path.stem, where="memory", path=path, stored=stored, is_used=is_used)
    for place in disks:
        for path, stored, is_used in disk_store.stores(place.absolute()):
            yield _Cache(key=path.name, where=str(place), path=path, stored=stored, is_used=is_used)


def _list(options: argparse.Namespace) -> int:
    table = Table("key", "dataset", "samples", "MB", "of MB", "where", "", box=None)
    for one in _caches(options.disk):
        stored = one.stored
        sizes = (f"{size / 1e6:,.0f}" for size in (stored.nbytes, stored.budget))
        kept = f"{stored.kept:,} of {stored.samples:,}"
        use = "in use" if one.is_used else ""
        table.add_row(one.key[:_SHOWN], escape(stored.name), kept, *sizes, escape(one.where), use)
    if table.row_count:
        Console().print(table)
    else:
        print("There is no cache in shared memory, nor in the folders given by --disk.")
    return 0


def _remove(options: argparse.Namespace) -> int:
    found = list(_caches(options.disk))
    chosen = [one for one in found if options.all or any(map(one.key.startswith, options.key))]
    unknown = [key for key in options.key if not key or not any(one.key.startswith(key) for one in found)]
    if unknown or not chosen:  # an empty key is a variable of a script that is not set, and not all caches
        names = "".join(f" {key!r}" for key in unknown)
        print(f"No such cache{names}: `dpex cache ls` lists the keys. Give one, or --all.", file=sys.stderr)
        return 1
    for one in chosen:
        if one.is_used:
            print(f"{one.key} in {one.where} is in use and stays", file=sys.stderr)
            continue
        shutil.rmtree(one.path) if one.path.is_dir() else one.path.unlink(missing_ok=True)
        print(f"{one.key} in {one.where} is removed")
    return int(any(one.is_used for one in chosen))
