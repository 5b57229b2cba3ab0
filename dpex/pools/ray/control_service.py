"""Check whether the control service of a Ray cluster (GCS, on its head) can be reached.

Without it nothing is started, placed or replaced, and a call to it waits. Workers that run go on, as batches do not
pass through it. Ray itself ends every process that is connected, the training too, when it stays away for longer than
`reconnect_s`. So the threads of dpex that call Ray about once a second connect to it first, and make no call while it
does not answer.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading

from dpex.system.clock import monotonic

EVERY_S = 1.0
"""Seconds between two attempts to connect, and for one; on a network that works it takes milliseconds."""
SILENT = 3
"""Attempts in a row without an answer until its loss is reported: a packet may be lost, and a busy head may be late."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_S = 60
"""Ray's own default."""


def reconnect_s() -> int:
    """Return after how many seconds without it Ray ends this process."""
    given = os.environ.get(RECONNECT_VARIABLE, "")
    return int(given) if given.isdigit() else RECONNECT_S


class ControlService:
    """The control service at ``address``: a machine and a port, as Ray writes them. From any thread."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._silent = 0
        self._tried_at = -math.inf
        self._lock = threading.Lock()

    def answers(self) -> bool:
        """Return True if the latest attempt to connect was answered. Makes one every `EVERY_S` seconds."""
        with self._lock:
            if monotonic() - self._tried_at >= EVERY_S:
                self._silent = 0 if self._is_there() else self._silent + 1
                self._tried_at = monotonic()
            return not self._silent

    def why_lost(self) -> str:
        """Return what follows if it has not answered for a while, for the user; "" if it has."""
        if self._silent < SILENT:
            return ""
        return (
            f"Ray's control service at {self._address} cannot be reached: workers that run go on, but no worker is "
            f"started or replaced on the cluster, and Ray ends this process if that lasts for {reconnect_s()} s "
            f"({RECONNECT_VARIABLE}); a later run can go on from the last state_dict()"
        )

    def _is_there(self) -> bool:
        machine, _, port = self._address.rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((machine.strip("[]"), int(port)), timeout=EVERY_S).close()
            return True
        return False
