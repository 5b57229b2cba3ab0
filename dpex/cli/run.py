"""``dpex run``: an unmodified script with dpex behind its loaders."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

from dpex.dropin.install import ROOT, begin
from dpex.dropin.options import RunOptions
from dpex.dropin.run_script import run_module, run_script
from dpex.options import Options

_DESCRIPTION = """
Run a Python script (or -m module) as python would, with dpex behind each torch.utils.data.DataLoader, in this process
and in all that it starts (torchrun, torch.multiprocessing, subprocess).
"""
_EPILOG = """\
workers:
  auto  Loaders with workers get as many as pay while training runs. Which samples form which batch and their order stay
        those of PyTorch; random augmentations are other draws than PyTorch's, and the same in each run with the same
        seed, whatever the number of workers.
  keep  The script's numbers. Batches are bit for bit PyTorch's, augmentations included.
  N     N for each loader with workers; bit for bit what PyTorch yields with num_workers=N.

  A loader with num_workers=0 stays in the training process: its dataset may count on that (a cache, a counter, a GPU).
  --also-in-process says that none does; as with PyTorch's workers, such a dataset then draws no longer from the random
  state of the script, which goes on differently. A loader of an IterableDataset keeps its number, which decides who
  reads what.

Settings that the script gives itself (prefetch_factor, persistent_workers, worker_init_fn, a multiprocessing context,
a generator) count as with PyTorch. Loaders that dpex cannot serve are left to PyTorch, and a line says which and why.

examples:
  dpex run train.py --epochs 3
  dpex run --num-workers keep -m package.train
  torchrun --nproc-per-node 2 --no-python dpex run train.py
"""
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    parser = subparsers.add_parser(
        "run",
        help="run a script with dpex behind its loaders",
        description=textwrap.fill(_DESCRIPTION.strip(), 100),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--num-workers", type=_workers, default="auto", metavar="N|auto|keep", help="see below (default: auto)"
    )
    parser.add_argument(
        "--also-in-process", action="store_true", help="give workers to loaders with num_workers=0, too"
    )
    parser.add_argument(
        "--distribute-mode",
        default="false",
        choices=("true", "false", "auto"),
        help="workers on the Ray cluster; auto: if the script is connected to one (default: false)",
    )
    parser.add_argument(
        "--head-address", default="auto", metavar="ADDRESS", help="of the cluster: auto, local or host:port"
    )
    parser.add_argument(
        "--memory-budget", type=_bytes, metavar="BYTES", help="of batches in flight at most, per loader: 500M, 2G, ..."
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus; 0: a free port")
    parser.add_argument(
        "--trace", metavar="FILE", help="record the tuning in FILE; {rank} and {pid} in its name are filled in"
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument(
        "script", metavar="SCRIPT", nargs=argparse.PARSER, help="a Python file, followed by arguments of its own"
    )
    parser.set_defaults(command=lambda options: _run(parser, options))


def _workers(text: str) -> int | str:
    if text in ("auto", "keep"):
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1, auto or keep")
    return int(text)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)i?B?", text, re.IGNORECASE)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of bytes, such as 500000000, 500M or 2G")
    return int(float(found[1]) * _UNITS[found[2].upper()])


def _run(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    options = _checked(parser, given)
    if given.trace is not None:
        os.environ["DPEX_TRACE"] = str(Path(given.trace).expanduser().absolute())
    begin(options, os.environ)
    script, *arguments = given.script[1:] if given.script[0] == "--" else given.script
    if given.is_module:
        run_module(script, arguments)
        return 0
    if not is_readable(script, "dpex run"):
        return 2
    run_script(script, arguments)
    return 0


def is_readable(script: str, command: str) -> bool:
    """Whether the script can be run; if not, ``command`` says why."""
    if os.access(script, os.R_OK):
        return True
    reason = "it is not to be read" if Path(script).exists() else "there is none"
    print(f"{command}: can't open file {script!r}: {reason}", file=sys.stderr)
    return False


def _checked(parser: argparse.ArgumentParser, given: argparse.Namespace) -> RunOptions:
    """Refuse now what every loader would refuse later."""
    if given.trace is not None and given.num_workers != "auto":
        parser.error(f"--trace {given.trace}: with --num-workers {given.num_workers} nothing is tuned; give auto")
    if given.also_in_process and given.num_workers == "keep":
        parser.error("--also-in-process: --num-workers keep leaves every loader its number; give auto or a number")
    mode: Any = {"true": True, "false": False}.get(given.distribute_mode, given.distribute_mode)
    options = RunOptions(
        num_workers=given.num_workers,
        also_in_process=given.also_in_process,
        distribute_mode=mode,
        head_address=given.head_address,
        memory_budget=given.memory_budget,
        metrics_port=given.metrics_port,
        prefix=sys.prefix,
        root=ROOT,
    )
    try:
        Options(**options.loader_options(1))
    except ValueError as error:
        parser.error(str(error))
    return options
