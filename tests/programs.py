"""Run a program in a new interpreter."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def ran(*arguments: object, timeout: float = 120, **options: Any) -> subprocess.CompletedProcess[str]:
    """Return what this Python did with the arguments. An AssertionError shows its output if it failed."""
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, check=False, **{"cwd": ROOT, **options}
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done
