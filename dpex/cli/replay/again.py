"""What happened in a recorded run, and would it again? See ``dpex replay``.

The recorded windows are shown to laws made anew, and what these decide is laid beside what was decided then.
From the first difference on that is no more than an indication: the windows stay as they were recorded, under the
recorded settings.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.law import law_for
from dpex.autotune.types import Decision, Sample
from dpex.cli.replay.reading import Trace, TraceSection, read
from dpex.errors import OptionError, TraceError


@dataclass(frozen=True, kw_only=True)
class ReplayedWindow:
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


def replay(trace: Trace, changes: Mapping[str, Any] | None = None) -> list[ReplayedWindow]:
    """Show all samples to laws made anew, under the recorded configuration with these ``changes``.

    Raises:
        OptionError: the changes do not go with the recorded configuration.
    """
    windows: list[ReplayedWindow] = []
    for section in trace.sections:
        for step, replayed in zip(section.steps, _decide(section, changes or {}), strict=True):
            recorded = None if step.decision is None else trace.decisions[step.decision]
            number = len(windows) + 1
            windows.append(ReplayedWindow(number=number, sample=step.sample, recorded=recorded, replayed=replayed))
    return windows


def _decide(section: TraceSection, changes: Mapping[str, Any]) -> list[Decision | None]:
    """What a new law decides on each sample, with what it found later that each decision had brought."""
    origin = section.origin
    law = law_for(replace(origin.config, **changes), origin.start)
    decided = [law.step(step.sample) for step in section.steps]
    judged = iter(law.decisions)
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
        OptionError: no knob of that name, or nothing that could be a value.
    """
    knobs = [field.name for field in fields(AutotuneConfig) if field.name != "trace"]
    changes: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if name not in knobs or not equals:
            raise OptionError(f"--set {text}: give KNOB=VALUE, with one of {', '.join(knobs)}")
        try:
            changes[name] = None if value == "None" else json.loads(value)
        except ValueError:
            raise OptionError(f"--set {text}: give a number, or None") from None
    return changes
