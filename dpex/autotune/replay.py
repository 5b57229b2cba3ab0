"""What happened in a recorded run, and would it again? `python -m dpex.autotune.replay trace.jsonl`.

The recorded windows are shown to controllers made anew, and what these decide is laid beside what was decided then.
From the first difference on that is no more than an indication: the windows stay as they were recorded, under the
recorded settings. Exit status: 0 the same decisions, 1 others, 2 the trace or an option cannot be used.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpex.autotune.config import AutotuneConfig, ConfigError
from dpex.autotune.controller import Controller
from dpex.autotune.trace.explain import report, summary
from dpex.autotune.trace.format import Section, Trace, TraceError, plain, read
from dpex.autotune.types import Decision, Sample


@dataclass(frozen=True, kw_only=True)
class Window:
    """A sample, its number (from 1 on), what was decided on it, and what is decided on it now."""

    number: int
    sample: Sample
    recorded: Decision | None
    replayed: Decision | None

    @property
    def is_same(self) -> bool:
        """The same change for the same reason, or none both times; words and predictions may differ."""
        return _essence(self.recorded) == _essence(self.replayed)


def _essence(decision: Decision | None) -> object:
    return None if decision is None else (decision.old, decision.new, decision.reason)


def replay(trace: Trace, changes: Mapping[str, Any] | None = None) -> list[Window]:
    """Show all samples to controllers made anew, under the recorded configuration with these ``changes``.

    Raises:
        ConfigError: the changes do not go with the recorded configuration.
    """
    windows: list[Window] = []
    for section in trace.sections:
        decided = _decide(section, changes or {})
        for step, replayed in zip(section.steps, decided, strict=True):
            recorded = None if step.decision is None else trace.decisions[step.decision]
            number = len(windows) + 1
            windows.append(Window(number=number, sample=step.sample, recorded=recorded, replayed=replayed))
    return windows


def _decide(section: Section, changes: Mapping[str, Any]) -> list[Decision | None]:
    """What a new controller decides on each sample, with what it found later that each decision had brought."""
    origin = section.origin
    controller = Controller(replace(origin.config, **changes), origin.start)
    controller.begin()
    decided = [controller.step(step.sample) for step in section.steps]
    judged = iter(controller.decisions)
    return [None if decision is None else next(judged) for decision in decided]


def load(path: str) -> Trace:
    """Read a trace file.

    Raises:
        TraceError: it cannot be opened or read.
    """
    try:
        with Path(path).open("rb") as lines:
            return read(lines, path)
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}; give a file written by AutotuneConfig(trace=...)") from error


def parse_changes(texts: Iterable[str]) -> dict[str, Any]:
    """``["max_local=4"]`` → ``{"max_local": 4}``; ranges are checked when a configuration is made.

    Raises:
        ConfigError: no knob of that name, or nothing that could be a value.
    """
    knobs = [field.name for field in fields(AutotuneConfig) if field.name != "trace"]
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in knobs or not equals:
            raise ConfigError(f"--set {text}: give KNOB=VALUE, with one of {', '.join(knobs)}")
        try:
            changes[name] = None if value == "None" else json.loads(value)
        except ValueError:
            raise ConfigError(f"--set {text}: give a number, or None") from None
    return changes


def main(arguments: Sequence[str] | None = None, write: Callable[[str], object] = print) -> int:
    """The command; see the module for what it returns."""
    parser = argparse.ArgumentParser(
        prog="python -m dpex.autotune.replay",
        description="Explain a recorded run, and see whether this version of dpex would decide the same.",
        epilog="exit status: 0 the same decisions, 1 others, 2 the trace or an option cannot be used",
    )
    parser.add_argument("trace", help="a file written by AutotuneConfig(trace=...) or DPEX_TRACE")
    parser.add_argument("--set", action="append", default=[], metavar="KNOB=VALUE", help="try another configuration")
    parser.add_argument("--windows", action="store_true", help="list all that was measured, window by window")
    parser.add_argument("--json", action="store_true", help="for programs")
    options = parser.parse_args(arguments)
    try:
        changes = parse_changes(options.set)
        trace = load(options.trace)
        windows = replay(trace, changes)
    except (TraceError, ConfigError) as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2
    if options.json:
        write(json.dumps(_for_programs(trace, windows, changes), indent=1, allow_nan=False))
    else:
        for line in report(trace, windows, changes, every_window=options.windows):
            write(line)
    return int(not all(window.is_same for window in windows))


def _for_programs(trace: Trace, windows: Sequence[Window], changes: Mapping[str, Any]) -> Any:
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


if __name__ == "__main__":
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` is no error
    sys.exit(main())
