"""A Ray cluster on this machine that an autoscaler lets grow and shrink: real raylets, as nodes that come and go.

It is what ``ray.cluster_utils.AutoscalingCluster`` starts, which neither works from Ray's wheel (a file of its is
missing there) nor leaves other Rays of this machine alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import psutil
from families import is_alive
from waiting import until

IDLE_MINUTES = 0.05
"""After which the autoscaler takes a node away."""
START_S = 120


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class GrowingCluster:
    """A head without CPUs, and nodes of ``node_cpus`` each that the autoscaler adds, ``most_nodes`` at most.

    It is started by ``ray start``; ``address`` is for ``ray.init``. It asks for no token, as those of
    ``ray.cluster_utils`` do not.
    """

    def __init__(self, *, node_cpus: int, most_nodes: int, store_bytes: int) -> None:
        self._node = {"CPU": node_cpus, "object_store_memory": store_bytes}
        self._most_nodes = most_nodes
        self._directory = Path(tempfile.mkdtemp(prefix="dpex"))
        port = free_port()
        self.address = f"{_own_address()}:{port}"
        scaling = self._directory / "autoscaling.json"
        scaling.write_text(json.dumps(self._config()))
        sizes = ["--num-cpus=0", f"--object-store-memory={store_bytes}", "--include-dashboard=false"]
        others = [f"--temp-dir={self._directory}", "--disable-usage-stats", f"--autoscaling-config={scaling}"]
        scales = {"AUTOSCALER_UPDATE_INTERVAL_S": "1", "RAY_FAKE_CLUSTER": "1"}
        try:
            subprocess.run(
                [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}", *sizes, *others],
                env={**os.environ, "RAY_AUTH_MODE": "disabled", **scales},
                stdout=subprocess.DEVNULL,
                check=True,
                timeout=START_S,
            )
        except BaseException:
            self.shutdown()
            raise

    def processes(self) -> list[psutil.Process]:
        """All that were started with this head's directory."""
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.pid != os.getpid() and any(str(self._directory) in part for part in process.cmdline()):
                    found.append(process)
        return found

    def shutdown(self) -> None:
        """End them, until none is there that another one has started meanwhile, and remove the directory."""
        while processes := self.processes():
            for process in processes:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            until(lambda pids=[process.pid for process in processes]: not any(map(is_alive, pids)), START_S)
        shutil.rmtree(self._directory, ignore_errors=True)

    def _config(self) -> dict[str, Any]:
        lists = ("cluster_synced_files", "rsync_exclude", "rsync_filter", "initialization_commands", "setup_commands")
        commands = ("head_setup_commands", "worker_setup_commands", "head_start_ray_commands")
        provider = {"type": "fake_multinode", "gcs_address": self.address, "use_node_id_as_ip": True}
        switches = {"disable_node_updaters": True, "disable_launch_config_check": True}
        head = {"resources": {"CPU": 0}, "node_config": {}, "min_workers": 0, "max_workers": 0}
        worker = {**head, "resources": self._node, "max_workers": self._most_nodes}
        return {
            "cluster_name": "dpex",
            "max_workers": self._most_nodes,
            "upscaling_speed": 1.0,
            "idle_timeout_minutes": IDLE_MINUTES,
            "provider": {**provider, **switches},
            "auth": {},
            "docker": {},
            "file_mounts": {},
            "file_mounts_sync_continuously": False,
            "head_node_type": "ray.head.default",
            "available_node_types": {"ray.head.default": head, "worker": worker},
            **{name: [] for name in (*lists, *commands, "worker_start_ray_commands")},
        }


def _own_address() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())
