"""``dpex run`` and ``dpex diagnose``: run an unchanged script with dpex behind its loaders, and report at its end."""

from __future__ import annotations

import argparse
import atexit
import builtins
import functools
import importlib.machinery
import io
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from dpex.cli.main import add_command
from dpex.errors import ClusterError, OptionError
from dpex.options import checked
from dpex.run.install import ROOT, has_served, install_in_children
from dpex.run.run_options import RunOptions
from dpex.system.ray_package import require_ray

_LOADERS_OPTIONS = {
    "distribute_mode": "place of workers: False (this machine), True (the Ray cluster) or auto, the cluster if there "
    "is one (default: False)",
    "head_address": "the cluster: auto, local, or host:port of its head (default: auto)",
    "metrics_port": "port of the live page and of the metrics; 0: a free one (default: $DPEX_METRICS_PORT)",
    "memory_budget": "maximum bytes of batches in flight, such as 2G or 2GiB (default: no limit)",
}
"""Options of a loader that ``dpex run`` takes as flags, with their help. The loader's own checks cover their values."""

_USAGE_ERROR = 2
"""The exit status with which argparse refuses arguments."""
_RUN = """
Run a Python script (or -m module) as python would, with dpex behind each torch.utils.data.DataLoader, in this process
and in all that it starts (torchrun, torch.multiprocessing, subprocess). At the end, print why training waited for data,
if it did, and what to do first.
"""
_RUN_MORE = """\
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
  A loader of an IterableDataset keeps its number, which determines the
  samples of each worker.

Settings that the script gives itself (prefetch_factor, persistent_workers,
worker_init_fn, a multiprocessing context, a generator) count as with PyTorch.
Under auto, prefetch_factor=2 counts as not given, as it is PyTorch's default.
Loaders that dpex cannot serve are left to PyTorch, and a line says which and
why.

examples:
  dpex run train.py --epochs 3
  dpex run --num-workers keep -m package.train
  torchrun --nproc-per-node 2 --no-python dpex run train.py
"""
_DIAGNOSE = """
Run a Python script (or -m module) as python would, and say at the end why training waits for data, if it does, what to
do first, and what would end the wait. Processes that the script starts are measured as well.
"""
_DIAGNOSE_MORE = """\
Batches are made by dpex's workers, as many as the script gives, and are
PyTorch's bit for bit: it is dpex run --num-workers keep.

examples:
  dpex diagnose train.py --epochs 1
  dpex diagnose --html report.html -m package.train
  torchrun --nproc-per-node 2 --no-python \\
      dpex diagnose --json "report-{rank}.json" train.py
"""


def register(subparsers: Any) -> None:
    summary = "run a script with dpex behind its loaders"
    parser = add_command(subparsers, "run", summary=summary, description=_RUN, epilog=_RUN_MORE)
    parser.add_argument(
        "--num-workers", type=_parsed_workers, default="auto", metavar="N|auto|keep", help="see below (default: auto)"
    )
    parser.add_argument(
        "--also-in-process", action="store_true", help="give workers to loaders with num_workers=0, too"
    )
    flags = {name: f"--{name.replace('_', '-')}" for name in _LOADERS_OPTIONS}
    for name, flag in flags.items():
        place, explained = f"loader.{name}", _LOADERS_OPTIONS[name]
        parser.add_argument(
            flag, dest=place, type=_parsed_flag, default=argparse.SUPPRESS, metavar="VALUE", help=explained
        )
    parser.add_argument("--quiet", action="store_true", help="print nothing at the end")
    _add_report_and_script(parser, "--num-workers", "--also-in-process", "--quiet", *flags.values())
    parser.set_defaults(command=functools.partial(_run_tuned, parser))

    summary = "run a script as it is, and say why it waits for data"
    parser = add_command(subparsers, "diagnose", summary=summary, description=_DIAGNOSE, epilog=_DIAGNOSE_MORE)
    _add_report_and_script(parser)
    parser.set_defaults(command=_run_diagnosed)


def _add_report_and_script(parser: argparse.ArgumentParser, *others: str) -> None:
    """Add the options of the report, and the script. ``others``: all other options of the command."""
    parser.set_defaults(own_options={"--full", "--html", "--json", *others})
    parser.add_argument("--full", action="store_true", help="print all tables of the report, not one screen")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page; see --json")
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="write the report of each loader as JSON; a number is added to the name if the file exists. {rank} and "
        "{pid} are filled in, and without {rank} only rank 0 writes",
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name, as for python -m")
    parser.add_argument(
        "script", metavar="SCRIPT", nargs=argparse.PARSER, help="a Python file, followed by arguments of its own"
    )


def _parsed_workers(text: str) -> int | str:
    if text in ("auto", "keep"):
        return text
    if not (text.isascii() and text.isdigit() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text!r}: give a whole number of at least 1, auto or keep")
    return int(text)


def _parsed_flag(text: str) -> Any:
    """Return the value of a flag: a number or a truth value if it is one, else the text."""
    try:
        return json.loads(text.lower() if text in ("True", "False") else text)
    except ValueError:
        return text


def _run_tuned(parser: argparse.ArgumentParser, given: argparse.Namespace) -> int:
    """Run the script, or refuse now the options that every loader would refuse later."""
    if given.also_in_process and given.num_workers == "keep":
        parser.error("--also-in-process: --num-workers keep leaves every loader its number; give auto or a number")
    options = _options(
        given,
        num_workers=given.num_workers,
        also_in_process=given.also_in_process,
        loader={name[7:]: value for name, value in vars(given).items() if name.startswith("loader.")},
        quiet=given.quiet,
    )
    try:
        found = checked(options.loader_options(1))
        if found["distribute_mode"] is True:
            require_ray()
    except (OptionError, ClusterError) as error:
        parser.error(str(error))
    return _run_target(given, options)


def _run_diagnosed(given: argparse.Namespace) -> int:
    is_complete = False
    try:
        status = _run_target(given, _options(given, command="diagnose", num_workers="keep"))
        is_complete = status == 0
        return status
    except SystemExit as end:
        is_complete = end.code in (None, 0)
        raise
    finally:
        if is_complete:  # a script that failed prints an error, which is enough
            atexit.register(_say_if_nothing_was_served, os.getpid())


def _say_if_nothing_was_served(pid: int) -> None:
    if os.getpid() == pid and not has_served():
        print("dpex diagnose: no DataLoader was iterated in this process", file=sys.stderr)


def _options(given: argparse.Namespace, **own: Any) -> RunOptions:
    return RunOptions(
        html=_absolute_path(given.html),
        json=_absolute_path(given.json),
        full=given.full,
        script=("-m", *_script_words(given)) if given.is_module else _script_words(given),
        prefix=sys.prefix,
        root=ROOT,
        **own,
    )


def _script_words(given: argparse.Namespace) -> tuple[str, ...]:
    return tuple(given.script[1:] if given.script[0] == "--" else given.script)


def _absolute_path(name: str | None) -> str | None:
    return None if name is None else str(Path(name).expanduser().absolute())


def _run_target(given: argparse.Namespace, options: RunOptions) -> int:
    script, *arguments = _script_words(given)
    is_folder = Path(script).is_dir()
    if not given.is_module and (is_folder or not os.access(script, os.R_OK)):
        reason = "it cannot be read" if Path(script).exists() else "there is none"
        reason = "it is a folder; give a file, or -m and a module's name" if is_folder else reason
        print(f"dpex {options.command}: can't open file {script!r}: {reason}", file=sys.stderr)
        return 2
    install_in_children(options, os.environ)
    try:
        (run_module if given.is_module else run_script)(script, arguments)
    except SystemExit as end:
        if end.code == _USAGE_ERROR:
            _say_whose_options_these_are(given, options.command, arguments)
        raise
    return 0


def _say_whose_options_these_are(given: argparse.Namespace, command: str, arguments: Sequence[str]) -> None:
    """Name the options of this command that stand after the script, which has refused its arguments."""
    ours = [word for word in arguments if word.partition("=")[0] in given.own_options]
    if ours:
        which = f"{' '.join(ours)} stands after the script, which got it as an argument of its own"
        print(f"dpex {command}: {which}: give it before the script: dpex {command} {ours[0]} ...", file=sys.stderr)


# -- the script --------------------------------------------------------------------------------------------------------
# It runs in this process as ``python script.py`` or ``python -m module`` would run it. It is ``__main__``, with its own
# ``sys.argv`` and ``sys.path[0]``. Its exceptions leave the process as under Python itself. The traceback begins with
# the frames of this command.


def run_script(path: str, arguments: Sequence[str]) -> None:
    """Run a script like ``python PATH ARGUMENTS``.

    Raises:
        OSError: The file cannot be read.
    """
    sys.argv = [path, *arguments]
    place = os.path.abspath(path)  # noqa: PTH100  (as Python: without following links)
    with io.open_code(str(Path(path).absolute())) as file:
        source = file.read()
    _replace_path_head(Path(path).resolve().parent)
    loader = importlib.machinery.SourceFileLoader("__main__", place)
    main = vars(_new_main(__file__=place, __loader__=loader))
    exec(compile(source, place, "exec", dont_inherit=True), main)


def run_module(name: str, arguments: Sequence[str]) -> None:
    sys.argv = ["-m", *arguments]
    _replace_path_head(Path.cwd())
    _new_main()
    run: Any = runpy._run_module_as_main  # type: ignore[attr-defined]
    run(name)


def _replace_path_head(*folder: Path) -> None:
    """Replace this command's folder in ``sys.path[0]`` by ``folder``, unless Python runs without it (``-P``)."""
    if not getattr(sys.flags, "safe_path", False):
        sys.path[:1] = map(str, folder)


def _new_main(**attributes: Any) -> ModuleType:
    main = sys.modules["__main__"] = ModuleType("__main__")
    vars(main).update({"__builtins__": builtins, "__cached__": None, "__annotations__": {}} | attributes)
    return main
