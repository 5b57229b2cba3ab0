"""The last whole run of the long tests: when, at which commit, and how far behind the code it is.

`make test-long` writes `tests/long_run.json`. `make test` prints its age, and fails where more than `MOST_BEHIND`
commits have changed `dpex/` since.
"""

import json
import subprocess
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

STARTED = time.monotonic()
ROOT = Path(__file__).parents[1]
FILE = ROOT / "tests" / "long_run.json"
MOST_BEHIND = 60
COVERED = "dpex"
"""The code that the long tests cover."""


def _git(*arguments: str) -> str | None:
    """Return the output of git, or None if it fails, as outside a checkout."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else None


def record(*, tests: int) -> None:
    """Write the file for the run of this process, which has just passed."""
    facts = {
        "date": datetime.now(timezone.utc).strftime("%Y-%m-%d"),
        "commit": _git("rev-parse", "HEAD"),
        "seconds": round(time.monotonic() - STARTED),
        "tests": tests,
    }
    FILE.write_text(json.dumps(facts, indent=2) + "\n")


def last() -> dict[str, Any]:
    """The recorded run."""
    facts: dict[str, Any] = json.loads(FILE.read_text())
    return facts


def commits_behind() -> int | None:
    """Commits that have changed `dpex/` since the recorded run, or None where git cannot tell."""
    run = last()
    found = _git("rev-list", "--count", "--no-merges", f"{run['commit']}..HEAD", "--", COVERED)
    if found is None:  # a clone without that commit
        found = _git("rev-list", "--count", "--no-merges", f"--since={run['date']}", "HEAD", "--", COVERED)
    return None if found is None else int(found)


def is_outdated() -> bool:
    """Return True if the long tests must run again before this code lands."""
    behind = commits_behind()
    return behind is not None and behind > MOST_BEHIND


def shown() -> str:
    """Return a line on the recorded run."""
    run, behind = last(), commits_behind()
    age = "not in a checkout" if behind is None else f"{behind} commits to {COVERED}/ since, at most {MOST_BEHIND}"
    text = f"Long tests: {run['tests']} passed in {run['seconds']} s on {run['date']} at {run['commit'][:7]} ({age})."
    return f"{text} Run `make test-long` first." if is_outdated() else text
