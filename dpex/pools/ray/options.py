"""What the user asks of Ray for each worker, and what that needs of a node."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_DEFAULTS = {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}


def actor_options(ray_remote_args: Mapping[str, Any] | None) -> dict[str, Any]:
    """Ray's options for a worker: the user's, and dpex's own where the user names none."""
    return {**_DEFAULTS, **{name: _plain(value) for name, value in (ray_remote_args or {}).items()}}


def _plain(value: Any) -> Any:
    """Ray takes no mappings but dicts."""
    return dict(value) if isinstance(value, Mapping) else value


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    """What a node must have in all to take a worker with these options."""
    named = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], "memory": options.get("memory", 0)}
    needs = {**named, **options.get("resources", {})}
    return {name: value for name, value in needs.items() if value}


def has_an_agent_of_its_own(options: Mapping[str, Any]) -> bool:
    """Whether each worker needs an actor of its own, in which Ray sets up what it reserves (which GPU is its), or which
    stands where only an actor can be told to stand. Others share an agent on each node, in bundles."""
    return bool(options["num_gpus"]) or not stands_anywhere(options) or not needs_of(options)


def stands_anywhere(options: Mapping[str, Any]) -> bool:
    """Whether a worker may stand wherever there is what it needs."""
    return options["scheduling_strategy"] in ("DEFAULT", "SPREAD") and "accelerator_type" not in options
