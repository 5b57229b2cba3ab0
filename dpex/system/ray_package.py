"""Ray as an optional package: import it, test whether it is connected, and use its private names.

This module has every private name of Ray that dpex uses.

Importing this module does not import Ray. `tests/project/test_torch_names.py` checks the private names in the
installed Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType
from typing import Any

from dpex.errors import ClusterError


class TokenError(RuntimeError):
    """A cluster refuses this process, which lacks the cluster's token."""


def is_ray_connected() -> bool:
    """Return whether this process is connected to a Ray cluster, without importing Ray."""
    ray = sys.modules.get("ray")
    return ray is not None and hasattr(ray, "is_initialized") and bool(ray.is_initialized())


def require_ray() -> None:
    """Check that Ray is installed, without importing it.

    Raises:
        ClusterError: Ray is not installed; the message names the extra that brings it.
    """
    if sys.modules.get("ray") is None and importlib.util.find_spec("ray") is None:
        raise ClusterError(
            "workers on a Ray cluster (distribute_mode=True, or resize(remote=...)) need Ray, which is not installed "
            f"for {sys.executable}: run `pip install 'dpex[ray]'`, or leave distribute_mode=False for workers on this "
            "machine"
        )


def import_ray(name: str = "ray") -> ModuleType:
    """Import Ray, or its module ``name``, such as "ray.util".

    Raises:
        ClusterError: Ray is not installed; the message names the extra that brings it.
    """
    require_ray()
    return importlib.import_module(name)


# -- private names -----------------------------------------------------------------------------------------------------


def is_client() -> bool:
    """Return True if this process is a Ray client: it is connected by ``ray://``, through a process of the cluster."""
    client = sys.modules.get("ray.util.client")
    return client is not None and bool(client.ray.is_connected())


def has_started_ray() -> bool:
    """Return True if this process started the Ray to which it is connected, as ``ray.init(address="local")`` does."""
    node: Any = importlib.import_module("ray._private.worker")._global_node
    return node is not None and bool(node.is_head())


def cluster_id(address: str | None = None) -> str:
    """Return the identity of the cluster whose head listens at ``address``. None: the connected cluster.

    One cluster may have several addresses. Ray waits 40 s for an answer, so check first that a program listens at the
    address.

    Raises:
        TokenError: The cluster asks for a token, and this process has none or a wrong one.
        RuntimeError: The program that answers is no Ray head.
    """
    if address is None:
        client = importlib.import_module("ray._private.worker").global_worker.gcs_client
    else:
        errors: Any = importlib.import_module("ray.exceptions")
        try:
            client = importlib.import_module("ray._raylet").GcsClient(address=address)
        except getattr(errors, "AuthenticationError", ()) as error:  # older releases of Ray ask for no token
            raise TokenError(str(error)) from error
        except errors.RayError as error:
            raise RuntimeError(str(error)) from error
    return str(client.cluster_id.hex())


def available_resources_per_node() -> dict[str, dict[str, float]]:
    """Return the free resources of each node, by Ray's id in hex. Ray's public functions return only the sum."""
    return dict(importlib.import_module("ray._private.state").available_resources_per_node())


def draining_nodes() -> set[str]:
    """Return Ray's ids, in hex, of the nodes that are draining. Ray has no public function for these."""
    return set(importlib.import_module("ray._private.state").state.get_draining_nodes())


def placement_group_near(bundle: dict[str, float], node: str | None, labels: dict[str, str]) -> Any:
    """Ask for a placement group of one bundle on a node with ``labels``, and on ``node`` if it has room.

    The argument for the node is private. Without it, Ray fills one node after the other.
    """
    groups = importlib.import_module("ray.util.placement_group")
    options: dict[str, Any] = {"bundle_label_selector": [labels]} if labels else {}
    if node is not None:
        options["_soft_target_node_id"] = node
    return groups.placement_group([bundle], strategy="STRICT_PACK", **options)
