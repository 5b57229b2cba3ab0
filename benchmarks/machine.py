"""What the figures were measured on: the machine and the versions."""

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("dpex", "torch", "numpy", "ray", "opencv-python-headless", "scikit-image")


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, memory in bytes, system, and the load when it was asked."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "shm_bytes": psutil.disk_usage("/dev/shm").total,
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that matter, those installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()
