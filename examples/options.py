"""Command-line options that the examples share."""

import argparse


def parser(
    description: str | None, *, num_workers: int, distribute_mode: bool, epochs: int = 1
) -> argparse.ArgumentParser:
    """A parser with the options of every example, and the defaults given."""
    options = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--epochs", type=int, default=epochs, help=f"passes over the data ({epochs})")
    options.add_argument("--limit", type=int, metavar="N", help="batches of each pass (all)")
    options.add_argument("--num-workers", type=int, default=num_workers, help=f"workers ({num_workers})")
    place = options.add_mutually_exclusive_group()
    place.add_argument("--distribute-mode", action="store_true", help="workers on the Ray cluster")
    place.add_argument("--local", action="store_false", dest="distribute_mode", help="workers on this machine")
    options.set_defaults(distribute_mode=distribute_mode)
    options.add_argument("--head-address", default="auto", help='"auto", "local" or "host:port" of the cluster')
    return options
