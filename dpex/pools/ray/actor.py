"""The actor class, its options, and what Ray says when one dies."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from functools import cache
from typing import Any

_OPTIONS = frozenset(
    {"num_cpus", "num_gpus", "memory", "resources", "accelerator_type", "scheduling_strategy", "label_selector"}
)


@cache
def actor_class() -> Any:
    """The actor class. It is local, so that it travels by value: a node without dpex can say so instead of failing."""

    class DpexWorker:
        def __init__(self) -> None:
            self._worker: Any = None

        def hello(self) -> tuple[str, str, int]:
            import os
            import socket

            import ray

            os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
            node = ray.get_runtime_context().get_node_id()
            return node, f"{socket.gethostname()} ({node[:8]})", os.getpid()

        def prepare(self, refs: list[Any], order: bytes) -> Any:
            import pickle

            try:
                from dpex.pools.ray import worker_actor
            except Exception as error:
                return f"dpex cannot be imported there: {type(error).__name__}: {error}"
            if self._worker is not None:
                self._worker.close()
                self._worker = None
            self._worker, report = worker_actor.prepare(pickle.loads(order), lambda: worker_actor.get_from_ray(refs))
            return pickle.dumps(report)

        def work(self, message: bytes) -> Any:
            return self._worker.work(message)

        def adopt(self, logical: int, state: bytes | None) -> None:
            self._worker.adopt(logical, state)

        def release(self, logical: int) -> bytes:
            return bytes(self._worker.release(logical))

        def __repr__(self) -> str:
            return "dpex worker"

    return importlib.import_module("ray").remote(DpexWorker)


def actor_options(resources: Mapping[str, Any] | None, runtime_env: Mapping[str, Any] | None) -> dict[str, Any]:
    """Ray's options for an actor.

    ``resources`` may name such options, or ``CPU``, ``GPU`` and resources of the cluster's own.
    """
    options: dict[str, Any] = {"num_cpus": 1, "num_gpus": 0, "max_restarts": 0, "scheduling_strategy": "SPREAD"}
    own = {}
    for name, value in (resources or {}).items():
        name = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(name, name)
        if name in _OPTIONS:
            options[name] = value
        else:
            own[name] = value
    if own:
        options["resources"] = {**options.get("resources", {}), **own}
    if runtime_env:
        options["runtime_env"] = dict(runtime_env)
    return options


def needs_of(options: Mapping[str, Any]) -> dict[str, float]:
    """What a node must have in all to take an actor with these options."""
    needs = {"CPU": options["num_cpus"], "GPU": options["num_gpus"], **options.get("resources", {})}
    return {name: value for name, value in needs.items() if value}


def cause_of_death(error: BaseException) -> tuple[str, bool]:
    """What Ray says about a death, in one line, and whether it was the node's or the network's: no ticket's fault."""
    text = " ".join(str(error).split())
    for mark in ("The actor is dead because ", "The actor died because ", "The actor "):
        if mark in text:
            text = text[text.rindex(mark) + len(mark) :]
            break
    text = text.split(" Some common causes include")[0].removeprefix("it died: ")
    node_died = "node has died" in text or "node was" in text or "its node" in text or "Node " in text
    return f"{text[:400]} [{type(error).__name__}]", node_died or isinstance(error, ConnectionError)
