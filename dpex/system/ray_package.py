"""Ray as an optional package, apart from `_ray` as that imports Ray: import it, and see whether it is connected.

Importing this module does not import Ray.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from types import ModuleType

from dpex.errors import ClusterError


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
    """Import Ray, or the module of it that ``name`` says.

    Raises:
        ClusterError: Ray is not installed; the message names the extra that brings it.
    """
    require_ray()
    return importlib.import_module(name)
