"""Every private name of Ray that dpex uses, once. `tests/test_torch_names.py` checks them in the Ray that is installed.

Importing this module does not import Ray.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from typing import Any

RAY_SEEN = ("2.60",)
"""Releases of Ray whose source was read for these names, and with which their test has passed."""

_OWN_THREADS = ("ray._private.", "ray.util.client.")
_CLIENTS_THREADS = "grpc."


def runs_in_own_threads(module: str) -> bool:
    """Whether Ray runs code of that module in threads of its own in a process that is connected.

    It prints what workers log and which errors they report, collects garbage when it is asked to, and talks to the
    cluster as a client, by gRPC. None of these threads draws random numbers. Threads of Ray's libraries (of Ray Data,
    for example) run functions of the user, so they are not meant here.
    """
    return module.startswith(_OWN_THREADS) or (module.startswith(_CLIENTS_THREADS) and is_client())


def is_client() -> bool:
    """Whether this process is connected by ``ray://``: no node of the cluster, but a client of a process there."""
    client = sys.modules.get("ray.util.client")
    return client is not None and bool(client.ray.is_connected())


def client_session() -> str:
    """A name for the connection of a client, "" where this process is none: a client's actor classes are known to the
    process that it is connected to, and end with the connection."""
    return str(importlib.import_module("ray").get_runtime_context().get_job_id()) if is_client() else ""


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return what is free on each node, by the node's number in hex. Ray's public functions tell only the sum."""

    def ask() -> dict[str, dict[str, float]]:
        import importlib

        return dict(importlib.import_module("ray._private.state").available_resources_per_node())

    found: dict[str, dict[str, float]] = _in_the_cluster(ask)()
    return found


def draining_nodes() -> set[str]:
    """Return the nodes that are being drained, by number in hex. Ray's public functions do not tell."""

    def ask() -> set[str]:
        import importlib

        return set(importlib.import_module("ray._private.state").state.get_draining_nodes())

    found: set[str] = _in_the_cluster(ask)()
    return found


def placement_group_states(groups: list[Any]) -> list[dict[str, Any]]:
    """Return what ``ray.util.placement_group_table`` has of each; Ray's client has no such function."""

    def ask(groups: list[Any]) -> list[dict[str, Any]]:
        from ray.util import placement_group_table

        return [placement_group_table(group) for group in groups]

    found: list[dict[str, Any]] = _in_the_cluster(ask)(groups)
    return found


def _in_the_cluster(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as it is, or, where this process is a client, as a task on the cluster: only that may ask there."""
    wrapped: Callable[..., Any]
    wrapped = importlib.import_module("ray._private.client_mode_hook").client_mode_wrap(function)
    return wrapped


def placement_group_near(bundle: dict[str, float], node: str | None, labels: dict[str, str]) -> Any:
    """Ask for a placement group of one bundle, on that node if it has room, on a node with these labels in any case.

    Without the private argument for the node Ray fills one node after the other.
    """
    groups = importlib.import_module("ray.util.placement_group")
    options: dict[str, Any] = {"bundle_label_selector": [labels]} if labels else {}
    if node is not None:
        options["_soft_target_node_id"] = node
    return groups.placement_group([bundle], strategy="STRICT_PACK", **options)
