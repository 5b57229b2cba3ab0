"""Processes of this machine, watched without a signal."""

from __future__ import annotations

import os


def pidfd(pid: int) -> int:
    """A descriptor that turns readable when that process ends; -1 where there is none."""
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return -1
