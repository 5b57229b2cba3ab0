"""``dpex run``: an unmodified script with dpex behind its loaders."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from dpex.cli import subcommand
from dpex.errors import ClusterError, OptionError
from dpex.options import byte_count, checked
from dpex.run.install import ROOT, begin
from dpex.run.options import RunOptions
from dpex.run.run_script import run_module, run_script
from dpex.system.ray_package import require_ray

_DESCRIPTION = """
Run a Python script (or -m module) as python would, with dpex behind each torch.utils.data.DataLoader, in this process
and in all that it starts (torchrun, torch.multiprocessing, subprocess).
"""
_EPILOG = """\
workers:
  auto  Loaders with workers get as many as pay while training runs. The samples
        of each batch and their order stay PyTorch's. Random augmentations are
        not PyTorch's draws; they are the same in each run with the same seed,
        whatever the number of workers.
  keep  Each loader has the number that the script gives. Batches are PyTorch's
        bit for bit, augmentations included.
  N     Each loader with workers has N of them. Batches are bit for bit what
        PyTorch yields with num_workers=N.

  A loader with num_workers=0 stays in the training process, as its dataset may
  rely on that (a cache, a counter, a GPU). With --also-in-process it gets
  workers, too. As with PyTorch's workers, its dataset then no longer draws from
  the script's own random state, so later random numbers of the script differ.
  A loader of an IterableDataset keeps its number, which decides what each
  worker reads.

Settings that the script gives itself (prefetch_factor, persistent_workers,
worker_init_fn, a multiprocessing context, a generator) count as with PyTorch.
Loaders that dpex cannot serve are left to PyTorch, and a line says which and
why. At the end a line for each loader that it served says how many workers it
had and has, how the wait changed, and what to do next.

examples:
  dpex run train.py --epochs 3
  dpex run --num-workers keep -m package.train
  torchrun --nproc-per-node 2 --no-python dpex run train.py
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    summary = "run a script with dpex behind its loaders"
    parser = subcommand.add(subparsers, "run", summary=summary, description=_DESCRIPTION, epilog=_EPILOG)
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
        "--head-address",
        default="auto",
        metavar="ADDRESS",
        help="address of the cluster: auto (default), local or host:port",
    )
    parser.add_argument(
        "--memory-budget",
        type=_bytes,
        metavar="BYTES",
        help="most bytes of a loader's batches in flight: 500M, 2G, ...",
    )
    parser.add_argument("--metrics-port", type=int, metavar="PORT", help="serve metrics for Prometheus; 0: a free port")
    parser.add_argument(
        "--trace", metavar="FILE", help="record the tuning in FILE; {rank} and {pid} in its name are filled in"
    )
    parser.add_argument("--quiet", action="store_true", help="leave out the lines at the end, see below")
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
    found = byte_count(text)
    if not isinstance(found, int):
        raise argparse.ArgumentTypeError(f"{text!r}: give a number of bytes, such as 500000000, 500M or 2G")
    return found


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
        quiet=given.quiet,
        prefix=sys.prefix,
        root=ROOT,
    )
    try:
        checked(options.loader_options(1))
        if mode is True:
            require_ray()
    except (OptionError, ClusterError) as error:
        parser.error(str(error))
    return options
