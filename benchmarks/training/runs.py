"""The file of a run, row by row, and the runs that are kept.

A run writes its file anew after each row, so it can be ended at any time, and goes on with what is missing when it is
started again with the same settings on the same commit. `results/training/` holds the runs that are quoted: those of a
commit without changes, on which the run's own checks hold.
"""

import json
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from benchmarks.machine import commit, machine, versions
from benchmarks.process import ROOT
from benchmarks.tables import write_whole

RESULTS = ROOT / "benchmarks" / "results"
KEPT = RESULTS / "training"


@dataclass(frozen=True, kw_only=True)
class Run:
    """What a run found, by row, and what it was measured on; all of it plain data."""

    subject: str
    settings: Mapping[str, Any]
    about: Mapping[str, Any]
    rows: Mapping[str, Any]

    @property
    def is_of_a_commit(self) -> bool:
        """Whether a commit without changes was measured."""
        return self.about["commit"] is not None and not self.about["dirty"]

    @property
    def day(self) -> str:
        """On which it ended, such as 2026-11-22."""
        return str(self.about["until"])[:10]


def begun(subject: str, settings: Mapping[str, Any], path: Path) -> Run:
    """The run in the file if it is of these settings and this commit, else a new one."""
    head, dirty = commit(ROOT)
    about = {"machine": described(), "versions": versions(), "commit": head, "dirty": dirty}
    fresh = Run(subject=subject, settings=settings, about=about | {"since": _now(), "until": _now()}, rows={})
    if not path.exists():
        return fresh
    found = read(path)
    alike = (found.subject, dict(found.settings)) == (subject, dict(settings))
    return found if alike and not dirty and about.items() <= dict(found.about).items() else fresh


def described() -> dict[str, Any]:
    """The machine, with its GPU if torch finds one."""
    import torch

    gpu = torch.cuda.get_device_name(0) if torch.cuda.is_available() else None
    return {**machine(), "gpu": gpu}


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def with_row(run: Run, key: str, row: Any) -> Run:
    """The run with another row, which ended now."""
    about = {**run.about, "until": _now()}
    return Run(subject=run.subject, settings=run.settings, about=about, rows={**run.rows, key: row})


def write(run: Run, path: Path) -> None:
    """A line for each item of a row, so that files can be compared."""
    head = json.dumps({"subject": run.subject, "settings": run.settings, "about": run.about}, indent=1)[:-2]
    rows = [
        f"  {json.dumps(key)}: [\n" + ",\n".join(f"   {json.dumps(item)}" for item in row) + "\n  ]"
        for key, row in run.rows.items()
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, [(head + ',\n "rows": {\n' + ",\n".join(rows) + "\n }\n}\n").encode()])


def read(path: Path) -> Run:
    """What `write` wrote."""
    return Run(**json.loads(path.read_text()))


def newest(subject: str, folder: Path | None = None) -> Run | None:
    """The kept run of that subject that ended last; None if there is none."""
    found = [read(path) for path in sorted((folder or KEPT).glob("*.json"))]
    return max((run for run in found if run.subject == subject), key=lambda run: str(run.about["until"]), default=None)


def quoted(block: str, subject: str, folder: Path | None = None) -> Run:
    """The kept run that a block of the documents is made of. Raises ValueError where there is none."""
    run = newest(subject, folder)
    if run is None:
        raise ValueError(f"the block {block!r} has no kept run to be made of: see benchmarks/README.md")
    return run


def keep(run: Run, name: str, problems: Callable[[Run], list[str]], folder: Path | None = None) -> list[str]:
    """Keep the run under that name, unless something speaks against quoting it: that is returned."""
    found = problems(run) + ([] if run.is_of_a_commit else ["it was not measured on a commit without changes"])
    if not found:
        write(run, (folder or KEPT) / f"{run.subject}-{name}.json")
    return found


def kept_if_asked(run: Run, name: str | None, problems: Callable[[Run], list[str]], folder: Path | None = None) -> bool:
    """Keep the run as `keep` does where a name was given; what speaks against it is printed, and the answer False."""
    against = [] if name is None else keep(run, name, problems, folder)
    for why in against:
        print(f"not kept: {why}", file=sys.stderr)
    return not against
