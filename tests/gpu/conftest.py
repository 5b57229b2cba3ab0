"""Keeps what the tests measure: with ``$DPEX_GPU_FIGURES`` a JSON file of all their properties and of the device."""

from __future__ import annotations

import json
import os
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
import torch

VARIABLE = "DPEX_GPU_FIGURES"
_seen: dict[str, dict[str, Any]] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note how a test ended, and the figures that it recorded."""
    if report.when == "call" or report.outcome != "passed":
        noted = {"outcome": report.outcome, "seconds": round(report.duration, 2), **dict(report.user_properties)}
        _seen.setdefault(report.nodeid, {}).update(noted)


def pytest_sessionfinish() -> None:
    """Write the file."""
    if path := os.environ.get(VARIABLE):
        Path(path).write_text(json.dumps({"about": _about(), "tests": _seen}, indent=1) + "\n")


def _about() -> dict[str, Any]:
    has_gpu = torch.cuda.is_available()
    return {
        "device": torch.cuda.get_device_name(0) if has_gpu else None,
        "torch": torch.__version__,
        "day": datetime.now(timezone.utc).date().isoformat(),
    }
