"""Choose how many streams an iterable dataset has under ``num_workers="auto"``. PURE.

The number of streams decides what is read: each worker iterates the dataset for itself, and what it yields depends on
how many there are. So it is chosen once, from what all ranks see alike, and never tuned:

- as many as `AutotuneConfig.max_streams` says, else one for each CPU of this rank (the CPUs that the process may use,
  shared among the ranks of this machine);
- at most the shards that the dataset names, as beyond these a stream would have nothing to read.

No other rank is asked. Ranks on machines with different CPUs choose different numbers unless ``max_streams`` is given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("dpex")

NAMES_OF_SHARDS = ("num_shards", "n_shards")
"""Attributes by which datasets (those of Hugging Face, for one) tell how many shards there are for this rank."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """How many, and why, in a sentence."""

    count: int
    why: str


def named_shards(dataset: Any) -> int | None:
    """How many shards a dataset says it has; None if it does not say."""
    for name in NAMES_OF_SHARDS:
        try:
            value = getattr(dataset, name, None)
        except Exception as error:  # a property may do anything, and nothing depends on it
            logger.info("auto: %s of the dataset could not be read (%r)", name, error)
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def choose(dataset: Any, cpus: int, most: int | None, environ: Mapping[str, str]) -> Streams:
    """See the module. cpus: of this rank. most: ``AutotuneConfig.max_streams``."""
    count, shards = cpus if most is None else most, named_shards(dataset)
    reason = f"this rank has {_plural(cpus, 'CPU')}" if most is None else f"max_streams={most} says so"
    if shards is not None and shards < count:
        count, reason = shards, f"the dataset names {_plural(shards, 'shard')}"
    why = (
        f"The dataset is read in {_plural(count, 'stream')}, as {reason}. The number decides what each worker reads, "
        "so it stays the same; only the prefetch is tuned."
    )
    if most is None and shards != count and _spans_machines(environ):
        why += " Where machines differ in CPUs, give AutotuneConfig(max_streams=...): all ranks need the same number."
    return Streams(count=count, why=why)


def _spans_machines(environ: Mapping[str, str]) -> bool:
    """Whether a launcher says that there are ranks on other machines."""
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    return world.isdigit() and local.isdigit() and int(world) > int(local)


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
