"""``dpex replay``: a recorded run explained, and decided again."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dpex.cli import subcommand
from dpex.cli.replay.again import ReplayedWindow, load, parse_changes, replay
from dpex.cli.replay.reading import Trace
from dpex.cli.replay.text import report, summary
from dpex.errors import OptionError, TraceError
from dpex.schedule.json_values import plain

_DESCRIPTION = """
Explain a recorded run, and see whether this version of dpex would decide the same.
"""
_EPILOG = """\
exit status:
  0  this version of dpex makes the same decisions
  1  it makes others
  2  the trace or an option cannot be used

examples:
  DPEX_TRACE=run-{rank}.jsonl python train.py
  dpex replay run-0.jsonl
  dpex replay run-0.jsonl --set max_local=4
"""


def register(subparsers: Any) -> None:
    """Add the subcommand."""
    summary_line = "explain a recorded run, and decide it again"
    parser = subcommand.add(subparsers, "replay", summary=summary_line, description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("trace", metavar="TRACE", help="a file written by AutotuneConfig(trace=...) or DPEX_TRACE")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="try another configuration")
    parser.add_argument("--windows", action="store_true", help="list all that was measured, window by window")
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.set_defaults(command=run)


def run(options: argparse.Namespace, write: Callable[[str], object] = print) -> int:
    """The command; see its help for what it returns."""
    try:
        changes = parse_changes(options.set)
        trace = load(options.trace)
        windows = replay(trace, changes)
    except (TraceError, OptionError) as error:
        print(f"dpex replay: {error}", file=sys.stderr)
        return 2
    if options.json:
        write(json.dumps(_for_programs(trace, windows, changes), indent=1, allow_nan=False))
    else:
        for line in report(trace, windows, changes, every_window=options.windows):
            write(line)
    return int(not all(window.is_same for window in windows))


def _for_programs(trace: Trace, windows: Sequence[ReplayedWindow], changes: Mapping[str, Any]) -> Any:
    different = [window.number for window in windows if not window.is_same]
    decided = [window for window in windows if window.recorded or window.replayed]
    return plain(
        {
            "header": trace.header,
            "is_torn": trace.is_torn,
            "summary": summary(trace),
            "changes": changes,
            "first_difference": different[0] if different else None,
            "decisions": [
                {"window": w.number, "at": w.sample.at, "recorded": w.recorded, "replayed": w.replayed} for w in decided
            ],
        }
    )
