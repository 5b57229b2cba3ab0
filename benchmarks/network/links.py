"""A trainer's network namespace and one for each node, joined by links of a given rate, delay and loss.

The rate is `tc`'s token bucket on both ends; delay and loss come from `delay.c`, as not every kernel has netem. A link
without either is a pair of virtual Ethernet devices. Root only.
"""

import functools
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

SOURCE = Path(__file__).with_name("delay.c")
BURST_BYTES = 128 << 10
"""Sent at once at most, at rates of up to 1 Gbit/s: two packets that are not yet segmented."""
BURST_S = 0.001
"""The same above that."""
QUEUE_S = 0.05
"""How long packets may wait for the token bucket: as in the buffers of a common switch."""
MTU = 1500
CONGESTION_CONTROLS = ("cubic", "reno")
"""The first that the kernel allows is chosen. Linux does cubic unless an administrator says otherwise. Both take each
loss for congestion."""
_CONTROL = "/proc/sys/net/ipv4/tcp_congestion_control"


@dataclass(frozen=True, kw_only=True)
class Link:
    """bits_per_s: of either direction. round_trip_s: there and back when nothing queues. loss: 0 to 1."""

    bits_per_s: float
    round_trip_s: float = 0.0
    loss: float = 0.0

    @property
    def bytes_per_s(self) -> float:
        """The rate in bytes."""
        return self.bits_per_s / 8


@functools.cache
def why_not() -> str:
    """Why there can be no such links here, or ""."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    missing = [program for program in ("ip", "tc", "cc") if shutil.which(program) is None]
    if missing:
        return f"there is no {' and no '.join(missing)}"
    return "" if _may_make() else "this machine's root may not make network namespaces, token buckets or TUN devices"


def _may_make() -> bool:
    """Whether root may: in many containers it may not."""
    trial = f"dpex{os.getpid()}trial"
    bucket = ("rate", "1mbit", "burst", "16kb", "limit", "16kb")
    try:
        with ExitStack() as stack:
            _run("ip", "netns", "add", trial)
            stack.callback(_run, "ip", "netns", "del", trial)
            _run("tc", "-n", trial, "qdisc", "add", "dev", "lo", "root", "tbf", *bucket)
            os.close(os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC))
    except (OSError, subprocess.CalledProcessError):
        return False
    return True


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)


class Network:
    """See the module. Enter it to make the namespaces; they go when it is left, and when this process ends.

    ``trainer``, ``nodes``: names of namespaces; ``address``: the trainer's address for each node.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        self._links = list(links)
        stem = f"dpex{os.getpid()}"
        self.trainer = f"{stem}t"
        self.nodes = [f"{stem}n{at}" for at in range(len(links))]
        self.address = [f"10.77.{at}.1" for at in range(len(links))]
        self._delays: list[subprocess.Popen[str] | None] = []
        self._stack = ExitStack()

    def __enter__(self) -> "Network":
        try:
            for namespace in (self.trainer, *self.nodes):
                _run("ip", "netns", "add", namespace)
                self._stack.callback(_run, "ip", "netns", "del", namespace)
                _run("ip", "-n", namespace, "link", "set", "lo", "up")
                choices = " || ".join(f"echo {name} > {_CONTROL}" for name in CONGESTION_CONTROLS)
                _run(*self.enter(namespace), "sh", "-c", f"{choices} || true")
            folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
            for at, link in enumerate(self._links):
                self._join(at, link, folder)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def set(self, at: int, link: Link) -> None:
        """Change a link that has a delay or loses packets, or only the rate of one that has not."""
        delay = self._delays[at]
        if delay is not None:
            _tell(delay, link)
        self._links[at] = link
        self._set_rates(at, link, "change")

    @staticmethod
    def enter(namespace: str) -> list[str]:
        """What to put before a command that is to run there."""
        return ["ip", "netns", "exec", namespace]

    def _ends(self, at: int) -> tuple[tuple[str, str], tuple[str, str]]:
        return (self.trainer, f"link{at}"), (self.nodes[at], "link0")

    def _join(self, at: int, link: Link, folder: Path) -> None:
        (near, near_device), (far, far_device) = self._ends(at)
        if link.round_trip_s or link.loss:
            self._delays.append(self._start_delay(at, link, folder))
        else:
            peer = ("peer", "name", far_device, "netns", far)
            _run("ip", "-n", near, "link", "add", near_device, "type", "veth", *peer)
            self._delays.append(None)
        for number, (namespace, device) in enumerate(self._ends(at), 1):
            _run("ip", "-n", namespace, "addr", "add", f"10.77.{at}.{number}/24", "dev", device)
            _run("ip", "-n", namespace, "link", "set", device, "mtu", str(MTU), "up")
        self._set_rates(at, link, "add")

    def _start_delay(self, at: int, link: Link, folder: Path) -> subprocess.Popen[str]:
        program = folder / "delay"
        if not program.exists():
            _run("cc", "-O2", "-o", str(program), str(SOURCE))
        command = [str(program), *(word for end in self._ends(at) for word in end)]
        process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._stack.callback(_end, process)
        _tell(process, link)
        if _open(process.stdout).readline() != "ready\n":
            raise OSError("the wire could not be made")
        return process

    def _set_rates(self, at: int, link: Link, how: str) -> None:
        burst = max(BURST_BYTES, int(link.bytes_per_s * BURST_S))
        limit = burst + max(BURST_BYTES, int(link.bytes_per_s * QUEUE_S))
        for namespace, device in self._ends(at):
            rate = ("rate", f"{int(link.bits_per_s)}bit", "burst", str(burst), "limit", str(limit))
            _run("tc", "-n", namespace, "qdisc", how, "dev", device, "root", "tbf", *rate)


def _open(stream: "IO[str] | None") -> "IO[str]":
    assert stream is not None
    return stream


def _tell(delay: subprocess.Popen[str], link: Link) -> None:
    stdin = _open(delay.stdin)
    stdin.write(f"{int(link.round_trip_s / 2 * 1e6)} {link.loss * 1e6}\n")
    stdin.flush()


def _end(process: subprocess.Popen[str]) -> None:
    _open(process.stdin).close()
    _open(process.stdout).close()
    process.wait()
