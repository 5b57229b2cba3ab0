"""What the figures were measured on: the machine, the versions, and the commit."""

import hashlib
import json
import os
import platform
import subprocess
from collections.abc import Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

PACKAGES = ("torch", "numpy", "ray", "opencv-python-headless", "scikit-image")


def machine() -> dict[str, Any]:
    """Processor, cores this process may use, sizes in bytes, the system, and the GPU that torch finds."""
    return {
        "processor": _processor(),
        "cores": len(os.sched_getaffinity(0)),
        "last_level_cache_bytes": last_level_cache_bytes(),
        "memory_bytes": psutil.virtual_memory().total,
        "shm_bytes": psutil.disk_usage("/dev/shm").total,
        "system": f"{platform.system()} {platform.release()}",
        "gpu": _gpu(),
    }


def _gpu() -> str | None:
    import torch

    return torch.cuda.get_device_name(0) if torch.cuda.is_available() else None


def machine_id() -> str:
    """Tells machines apart without naming them."""
    told = Path("/etc/machine-id").read_text() if Path("/etc/machine-id").exists() else ""
    parts = json.dumps([platform.node() + told, machine()])
    return hashlib.sha256(parts.encode()).hexdigest()[:8]


def load() -> float:
    """Processes that ran or wanted to, on average over the last minute."""
    return round(os.getloadavg()[0], 2)


services: set[int] = set()
"""Processes below this one that serve its dataset, and belong to no loader."""


def process_tree(pid: int | None = None) -> list[psutil.Process]:
    """This process, or that one, and all those below it but `services`. Raises psutil.NoSuchProcess."""
    root = psutil.Process(pid)
    return [root, *(each for each in root.children(recursive=True) if each.pid not in services)]


def tree_bytes(pid: int | None = None) -> int:
    """Sum of the proportional set sizes of that tree, see `proportional_bytes`."""
    return proportional_bytes(process_tree(pid))


def proportional_bytes(processes: Iterable[psutil.Process]) -> int:
    """Sum of the proportional set sizes: a page that several processes map is counted once."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total


MEASURED = ("dpex", "benchmarks", ":(exclude)benchmarks/results", ":(exclude)*.md")
"""What makes the figures: changes elsewhere, and the results themselves, do not matter."""


def commit(root: Path) -> tuple[str | None, bool]:
    """The commit that is checked out at `root`, and whether what is measured differs; None if git does not know."""
    try:
        asked = [["rev-parse", "HEAD"], ["status", "--porcelain", "--", *MEASURED]]
        head, changes = (
            subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, check=True).stdout
            for words in asked
        )
    except (OSError, subprocess.CalledProcessError):
        return None, True
    return head.strip(), bool(changes.strip())


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
