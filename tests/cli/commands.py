"""Runs the command in a process of its own, as a user would."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
ROOT = Path(__file__).parents[2]


def python(*arguments: str, cwd: Path = SCRIPTS, timeout: float = 300, **options: Any) -> Any:
    """``python ARGUMENTS`` with this tree's dpex; the completed process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("DPEX_", "PYTHON"))}
    environment |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"} | options.pop("env", {})
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        timeout=timeout,
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        **options,
    )


def dpex(*arguments: str, **options: Any) -> Any:
    """``dpex ARGUMENTS``."""
    return python("-m", "dpex", *arguments, **options)
