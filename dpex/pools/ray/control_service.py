"""Watch whether the control service of a Ray cluster (GCS, on its head) can be reached.

Without it nothing is started, placed or replaced, and a call to it waits. Workers that run go on, as batches do not
pass through it. Ray itself ends every process that is connected, the training too, when it stays away for longer than
`reconnect_s`. So a thread of dpex's own ("dpex-control") connects to it now and then and reports its loss, and others
do not call it then.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import weakref
from collections.abc import Callable

from dpex.pools.agent.nodes import NodeNews

EVERY_S = 1.0
"""Seconds between two knocks, and for one; a connection on a network that works takes milliseconds."""
SILENT = 3
"""Knocks in a row without an answer until its loss is reported: a packet may be lost, and a busy head may be late."""
RECONNECT_VARIABLE = "RAY_gcs_rpc_server_reconnect_timeout_s"
RECONNECT_S = 60
"""Ray's own default."""

Tell = Callable[[NodeNews], None]


def reconnect_s() -> int:
    """Return after how many seconds without it Ray ends this process."""
    given = os.environ.get(RECONNECT_VARIABLE, "")
    return int(given) if given.isdigit() else RECONNECT_S


class ControlService:
    """See the module. ``address``: a machine and a port, as Ray writes them."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._silent = 0
        self._listeners: list[weakref.WeakMethod[Tell]] = []
        self._stopped = threading.Event()
        arguments = (weakref.ref(self), self._stopped)
        threading.Thread(target=_run, args=arguments, name="dpex-control", daemon=True).start()

    @property
    def answers(self) -> bool:
        """True if the latest knock was answered."""
        return self._silent == 0

    def listen(self, tell: Tell) -> None:
        """Call this method too, in the thread, when it went or came back, for as long as its object is there."""
        self._listeners = [known for known in self._listeners if known() is not None] + [weakref.WeakMethod(tell)]

    def stop(self) -> None:
        """Have the thread end. Idempotent."""
        self._stopped.set()

    def knock(self) -> None:
        """See whether it is there, and tell of a change."""
        was_silent, self._silent = self._silent, 0 if self._is_there() else self._silent + 1
        if self._silent == SILENT:
            self._tell(
                f"Ray's control service at {self._address} cannot be reached: workers that run go on, but no worker is "
                f"started or replaced on the cluster, and Ray ends this process if that lasts for {reconnect_s()} s "
                f"({RECONNECT_VARIABLE}); a later run can go on from the last state_dict()"
            )
        elif was_silent >= SILENT and not self._silent:
            self._tell(f"Ray's control service at {self._address} can be reached again", warning=False)

    def _is_there(self) -> bool:
        machine, _, port = self._address.rpartition(":")
        with contextlib.suppress(OSError):
            socket.create_connection((machine.strip("[]"), int(port)), timeout=EVERY_S).close()
            return True
        return False

    def _tell(self, why: str, *, warning: bool = True) -> None:
        for known in self._listeners:
            if (tell := known()) is not None:
                tell(NodeNews("notice", why=why, warning=warning))


def _run(service: weakref.ref[ControlService], stopped: threading.Event) -> None:
    """Body of the thread, which does not keep the service alive."""
    while not stopped.wait(EVERY_S) and (found := service()) is not None:
        found.knock()
        del found
