"""Command-line options that the examples share."""

import argparse
from typing import Any


def parser(
    description: str | None, *, num_workers: int, distribute_mode: bool, epochs: int = 1
) -> argparse.ArgumentParser:
    """Return a parser with the options of every example, and these defaults."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--epochs", type=int, default=epochs, help=f"passes over the data ({epochs})")
    found.add_argument("--limit", type=int, metavar="N", help="end each epoch after N batches")
    found.add_argument("--num-workers", type=int, default=num_workers, help=f"number of workers ({num_workers})")
    place = found.add_mutually_exclusive_group()
    here, there = ("", " (default)") if distribute_mode else (" (default)", "")
    place.add_argument("--local", action="store_false", dest="distribute_mode", help=f"workers on this machine{here}")
    place.add_argument("--distribute-mode", action="store_true", help=f"workers on the Ray cluster{there}")
    found.set_defaults(distribute_mode=distribute_mode)
    found.add_argument(
        "--head-address",
        default="auto",
        metavar="ADDRESS",
        help="of the Ray cluster: host:port; local (a private one on this machine); or auto (the one that is connected "
        "or that RAY_ADDRESS names, else a private one)",
    )
    return found


def workers(options: argparse.Namespace) -> dict[str, Any]:
    """Return what the options say of workers, as arguments of `DpexDataLoader`."""
    return {
        "num_workers": options.num_workers,
        "distribute_mode": options.distribute_mode,
        "head_address": options.head_address,
    }


def framework_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of the examples in which a framework trains."""
    found = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    found.add_argument("--epochs", type=int, default=2, help="passes over the data (2)")
    found.add_argument("--limit", type=int, metavar="N", help="end each epoch after N batches")
    found.add_argument("--accelerator", choices=("auto", "cpu"), default="auto", help="where to train (auto)")
    return found
