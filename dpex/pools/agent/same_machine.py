"""Whether an agent runs on the trainer's machine, and the socket by which it reaches the trainer there.

The socket has an abstract name, which leaves nothing behind and can be reached within one network namespace only: a
container with a network of its own connects as another machine would. Descriptors and numbers of processes are passed
on, so both ends must count processes alike, too. This module imports no torch.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import sys
from pathlib import Path
from typing import NamedTuple


class LocalAddress(NamedTuple):
    """``machine``: see `machine`. ``name``: of the abstract socket, without its leading zero byte."""

    machine: str
    name: str


def machine() -> str:
    """What tells this machine, since it was booted, and this way of numbering processes from others; "" if unknown."""
    with contextlib.suppress(OSError):
        booted = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{booted}/{Path('/proc/self/ns/pid').readlink()}"
    return ""


def listen(backlog: int) -> tuple[socket.socket, LocalAddress] | None:
    """A socket that listens for agents of this machine, and its address; None where there can be none."""
    here = machine()
    if not sys.platform.startswith("linux") or not here:
        return None
    address = LocalAddress(here, f"dpex-{secrets.token_hex(16)}")
    found = socket.socket(socket.AF_UNIX)
    try:
        found.bind(f"\0{address.name}")
        found.listen(backlog)
    except OSError:
        found.close()
        return None
    return found, address


def reach(address: LocalAddress, timeout_s: float) -> socket.socket | None:
    """A connection to that address; None if it is another machine's, or cannot be reached from this container."""
    if address.machine != machine():
        return None
    found = socket.socket(socket.AF_UNIX)
    try:
        found.settimeout(timeout_s)
        found.connect(f"\0{address.name}")
    except OSError:
        found.close()
        return None
    return found
