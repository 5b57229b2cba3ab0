"""``dpex compare``: two diagnoses beside each other, and an exit status for continuous integration."""

from __future__ import annotations

import argparse
import json
import operator
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from dpex.cli.main import add_command
from dpex.diagnose.report import VERSION

_DESCRIPTION = """
Show two diagnoses beside each other: files that `dpex diagnose --json FILE script.py` wrote, or that hold
loader.diagnose().to_dict() as JSON. With --fail-if, the exit status says whether the second one is good enough.
"""
_EPILOG = """\
quantities for --fail-if, all of the second file:
  rate   batches per second       wait   share of the time in next()
  stall  share of the time in which the GPU was idle because data was missing
  held   share of the time in which the training step waited for a CPU
  cost   seconds to make a batch   cpu   CPU seconds of that

exit status:
  0  no condition of --fail-if is met
  1  one is met
  2  a file or a condition cannot be used, or a quantity was not measured

examples:
  dpex compare main.json branch.json --fail-if "wait > 10%"
  dpex compare main.json branch.json --fail-if "rate < 0.95x" --fail-if "cost > 1.1x"   # x: times the first file's
"""
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    ">": operator.gt,
    ">=": operator.ge,
    "<": operator.lt,
    "<=": operator.le,
}
_CONDITION = re.compile(r"\s*(?P<name>[a-z]+)\s*(?P<operator>[<>]=?)\s*(?P<value>\d+(?:\.\d+)?)\s*(?P<unit>[%x]?)\s*")
_HEADINGS = {
    "rate": "batches/s",
    "wait": "wait",
    "stall": "GPU stall",
    "held": "step waiting for a CPU",
    "cost": "making a batch, s",
    "cpu": "CPU time of that, s",
}
_RATIOS = {"wait", "stall", "held"}


class _UnusableError(Exception):
    """A file or a condition is invalid. The text gives the reason."""


@dataclass(frozen=True, kw_only=True)
class DiagnosisFigures:
    """The figures of one diagnosis that are compared. ``values``: by the names of ``_HEADINGS``; None: not measured."""

    title: str
    advice: str
    values: Mapping[str, float | None]


def read(path: str) -> DiagnosisFigures:
    """Return what a file says.

    Raises:
        _UnusableError: It is no diagnosis, or a part of one, or one of another version.
    """
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise _UnusableError(f"{path}: {error}") from None
    except ValueError:
        found = None
    if not isinstance(found, dict) or "version" not in found:
        raise _UnusableError(f"{path}: it is no diagnosis. Give a file that `dpex diagnose --json FILE` wrote")
    if found["version"] != VERSION:
        version = found["version"]
        raise _UnusableError(f"{path}: not a diagnosis of version {VERSION} (version: {version!r}); write it again")
    try:
        return _report(found)
    except (LookupError, TypeError) as error:
        raise _UnusableError(f"{path}: not a whole diagnosis ({error!r}); write it again") from None


def _report(found: Mapping[str, Any]) -> DiagnosisFigures:
    facts, verdict = found["facts"], found["verdict"]
    evidence = {one["name"]: one["value"] for one in verdict["evidence"]}
    wall_s = facts["wall_s"]
    return DiagnosisFigures(
        title=verdict["title"],
        advice=found["advice"],
        values={
            "rate": facts["batches"] / wall_s if wall_s else None,
            "wait": facts["wait_ratio"],
            "stall": facts["gpu_stall_ratio"],
            "held": facts["held_ratio"],
            "cost": evidence.get("making a batch"),
            "cpu": evidence.get("CPU time of that"),
        },
    )


def is_met(condition: str, first: DiagnosisFigures, second: DiagnosisFigures) -> bool:
    """Return whether a condition such as ``"wait > 10%"`` or ``"rate < 0.95x"`` holds of the second report.

    Raises:
        _UnusableError: It is no condition, or its quantity was not measured.
    """
    found = _CONDITION.fullmatch(condition)
    if found is None or found["name"] not in _HEADINGS:
        names = ", ".join(_HEADINGS)
        raise _UnusableError(
            f"--fail-if {condition!r}: give NAME < VALUE or NAME > VALUE, such as 'wait > 10%'; names: {names}"
        )
    name, limit = found["name"], float(found["value"])
    value, base = second.values[name], first.values[name]
    if value is None or (found["unit"] == "x" and base is None):
        raise _UnusableError(f"--fail-if {condition!r}: {_HEADINGS[name]} was not measured")
    limit *= {"%": 0.01, "x": base or 0.0, "": 1.0}[found["unit"]]
    return _OPERATORS[found["operator"]](value, limit)


def table(names: tuple[str, str], reports: tuple[DiagnosisFigures, DiagnosisFigures]) -> Table:
    """Return the quantities of both reports, and the second over the first."""
    shown = Table("", *map(escape, names), "", box=None, pad_edge=False)
    for key, heading in _HEADINGS.items():
        first, second = (report.values[key] for report in reports)
        if first is not None or second is not None:
            ratio = f"{second / first:.2f}x" if first and second is not None else ""
            shown.add_row(heading, _text(key, first), _text(key, second), ratio)
    shown.add_row("verdict", *(report.title for report in reports), "")
    return shown


def _text(name: str, value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.1%}" if name in _RATIOS else f"{value:.3g}"


def compare(options: argparse.Namespace) -> int:
    """Print the table and the conditions that are met; returns the exit status that the help lists."""
    console = Console(highlight=False, soft_wrap=True)
    try:
        first, second = read(options.first), read(options.second)
        met = [condition for condition in options.fail_if if is_met(condition, first, second)]
    except _UnusableError as error:
        print(f"dpex compare: {error}", file=sys.stderr)
        return 2
    console.print(table((options.first, options.second), (first, second)))
    if second.advice:
        console.print(f"\nFirst advice of {options.second}: {second.advice}", markup=False)
    for condition in met:
        console.print(f"FAILED: {condition}", markup=False)
    return 1 if met else 0


def register(subparsers: Any) -> None:
    """Add the command."""
    summary = "two diagnoses beside each other, with an exit status for CI"
    parser = add_command(subparsers, "compare", summary=summary, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("first", metavar="FIRST", help="a diagnosis as JSON, such as that of the main branch")
    parser.add_argument("second", metavar="SECOND", help="the one that is judged")
    parser.add_argument(
        "--fail-if", action="append", default=[], metavar="CONDITION", help="end with 1 if it holds; may be repeated"
    )
    parser.set_defaults(command=compare)
