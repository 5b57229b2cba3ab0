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
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "shm_bytes": psutil.disk_usage("/dev/shm").total,
        "system": f"{platform.system()} {platform.release()}",
        "load_1min": round(os.getloadavg()[0], 2),
    }


CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
UNKNOWN_CACHE_BYTES = 32 * 2**20
"""Taken where the system does not say: what a common server has for each of its groups of cores."""


def last_level_cache_bytes(caches: Path = CACHES) -> int:
    """Size of the largest cache of the first processor that holds data."""
    found = [
        _bytes((cache / "size").read_text())
        for cache in caches.glob("index*")
        if (cache / "type").read_text().strip() != "Instruction"
    ]
    return max(found, default=UNKNOWN_CACHE_BYTES)


def _bytes(size: str) -> int:
    """32768K, 1M or 512 in bytes."""
    number, unit = size.strip()[:-1], size.strip()[-1:]
    scale = {"K": 2**10, "M": 2**20, "G": 2**30}.get(unit)
    return int(number) * scale if scale else int(size)


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
