"""``dpex --about``: the versions, the CPUs and the settings that a report of a problem needs.

The text contains no paths, host names or addresses. The value of an environment variable is shown if it is a number;
else only the variable's name is shown. This module does not import torch or Ray.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import multiprocessing
import os
import platform
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from dpex.measure.readable import size
from dpex.system.cpus import cgroup_cpus, local_ranks, rank_cpus, usable_cpus
from dpex.system.meter import free_memory
from dpex.version import VERSION

_PACKAGES = ("torch", "ray", "numpy", "torchdata", "lightning", "accelerate", "transformers", "webdataset", "datasets")
"""Packages whose versions are shown if they are installed. torch and Ray are shown in any case."""
_NAMES = (
    "RAY_ADDRESS",
    "RAY_USE_TLS",
    "WORLD_SIZE",
    "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "SLURM_NTASKS_PER_NODE",
    "CUDA_VISIBLE_DEVICES",
    "OMP_NUM_THREADS",
    "MALLOC_TRIM_THRESHOLD_",
    "MALLOC_TOP_PAD_",
    "MALLOC_MMAP_THRESHOLD_",
    "MALLOC_MMAP_MAX_",
    "GLIBC_TUNABLES",
    "PYTHON_GIL",
)
"""Variables other than ``DPEX_*`` that change the number of workers, their place or their memory."""


class About(argparse.Action):
    """Prints the text and exits, as ``--version`` does."""

    def __init__(self, option_strings: list[str], dest: str, **options: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, **options)

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        print(about_text(os.environ))
        parser.exit()


def about_text(environ: Mapping[str, str]) -> str:
    """Return the text. ``environ``: the environment variables of a training."""
    rows = [*_versions(), *_machine(environ), *_settings(environ)]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def _versions() -> Iterator[tuple[str, str]]:
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    yield "dpex", VERSION
    yield "Python", f"{platform.python_version()} ({platform.python_implementation()}{'' if has_gil else ', no GIL'})"
    for name in _PACKAGES:
        version = _version(name)
        if version or name in ("torch", "ray"):
            yield name, version or "not installed"
    libc = " ".join(platform.libc_ver()).strip()
    yield "system", ", ".join(filter(None, (platform.system(), platform.release(), platform.machine(), libc)))


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _machine(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    quota, ranks, free = cgroup_cpus(), local_ranks(environ), free_memory()
    yield "CPUs", f"{os.cpu_count()} of the machine, {usable_cpus():g} for this process"
    yield "cgroup quota", "none" if quota is None else f"{quota:g} CPUs"
    yield "ranks", f"{ranks} on this machine; CPUs for each: {rank_cpus()}"
    yield "free memory", "unknown" if free is None else size(free)
    yield "start method", f"{multiprocessing.get_all_start_methods()[0]} by default"


def _settings(environ: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the variables that are set. Only numbers are shown, because any other value may name a path or a host."""
    for name in sorted(name for name in environ if name.startswith("DPEX_") or name in _NAMES):
        yield name, environ[name] if environ[name].isascii() and environ[name].isdigit() else "set"
