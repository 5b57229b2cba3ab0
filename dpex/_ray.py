"""Every private name of Ray that dpex uses, once. `tests/test_torch_names.py` checks them in the Ray that is installed.

Importing this module does not import Ray.
"""

from __future__ import annotations

import importlib
import sys
from typing import Any

RAY_SEEN = ("2.60",)
"""Releases of Ray whose source was read for these names, and with which their test has passed."""


def is_client() -> bool:
    """Return True if this process is connected by ``ray://``: a client of a process of the cluster."""
    client = sys.modules.get("ray.util.client")
    return client is not None and bool(client.ray.is_connected())


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return what is free on each node, by the node's number in hex. Ray's public functions tell only the sum."""
    return dict(importlib.import_module("ray._private.state").available_resources_per_node())


def draining_nodes() -> set[str]:
    """Return the nodes that are being drained, by number in hex. Ray's public functions do not tell."""
    return set(importlib.import_module("ray._private.state").state.get_draining_nodes())


def placement_group_near(bundle: dict[str, float], node: str | None, labels: dict[str, str]) -> Any:
    """Ask for a placement group of one bundle, on that node if it has room, on a node with these labels in any case.

    Without the private argument for the node Ray fills one node after the other.
    """
    groups = importlib.import_module("ray.util.placement_group")
    options: dict[str, Any] = {"bundle_label_selector": [labels]} if labels else {}
    if node is not None:
        options["_soft_target_node_id"] = node
    return groups.placement_group([bundle], strategy="STRICT_PACK", **options)
