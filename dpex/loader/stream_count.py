"""Chooses the number of streams that an iterable dataset is read in under ``num_workers="auto"``.

Each worker iterates the dataset for itself, and its samples may depend on the number of workers. So the number decides
what is read. It is chosen once (`choose`) and is never tuned:

- It is `AutotuneConfig.max_streams`. Without that, it is one for each CPU of this rank (the CPUs that the process may
  use, shared among the ranks of this machine). Ranks on machines with different CPUs then choose different numbers.
- It is at most the number of shards that the dataset names, as further streams would have nothing to read. A pipeline
  of webdataset names its URLs. If it gives each rank some of them, the number that every rank has counts. A dataset
  of Hugging Face names this rank's shards.

A dataset that names its shards splits itself. Any other dataset shows whether it does in its first stream (see
`dpex.schedule.streams`).
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch.utils.data import IterableDataset, IterDataPipe

from dpex.autotune.config import AutotuneConfig
from dpex.measure.readable import plural
from dpex.options import LoaderOptions
from dpex.schedule.probing import attribute
from dpex.system.cpus import rank_cpus

if TYPE_CHECKING:
    from dpex.loader.rebuilt import Source

logger = logging.getLogger("dpex")

NAMES_OF_SHARDS = ("num_shards", "n_shards")
"""Attributes by which datasets (those of Hugging Face, for one) tell how many shards there are for this rank."""
_SPLITS_BY_RANK = "split_by_node"
"""webdataset's function that gives each rank some of the URLs."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """A number of streams, and its reason."""

    count: int
    """The number of streams."""
    why: str
    """The number and the reason, in sentences."""
    is_certain: bool = True
    """All begin at once; else there are several only if the first shows that the dataset splits itself."""


def named_shards(dataset: Any, ranks: int = 1) -> int | None:
    """Return the number of shards that a dataset names for each of the ``ranks``; None if it names none."""
    for name in NAMES_OF_SHARDS:
        try:
            value = getattr(dataset, name, None)
        except Exception as error:  # a property may do anything, and nothing depends on it
            logger.info("auto: %s of the dataset could not be read (%r)", name, error)
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return _listed_urls(dataset, ranks)


def _listed_urls(dataset: Any, ranks: int) -> int | None:
    """Return the URLs of a webdataset pipeline (1.0) for each rank; None of one that draws them without an end."""
    stages = attribute(dataset, "pipeline")
    if not isinstance(stages, list) or not stages:
        return None
    urls = attribute(stages[0], "urls")
    if not isinstance(urls, list) or not urls or not hasattr(type(stages[0]), "__len__"):
        return None
    is_split = any(getattr(stage, "__name__", "") == _SPLITS_BY_RANK for stage in stages)
    return max(1, len(urls) // ranks) if is_split else len(urls)


def streams_of(options: LoaderOptions, dataset: Any, made_from: Source | None) -> Streams | None:
    """Return the number of streams under ``num_workers="auto"``; None for a dataset that is not iterable.

    A loader that was made from another keeps its number, as a wrapper of the dataset may name no shards.
    """
    if not isinstance(dataset, IterableDataset):
        return None
    if made_from is not None and made_from.streams is not None:
        return made_from.streams
    autotune = options.autotune
    most = autotune.max_streams if isinstance(autotune, AutotuneConfig) else None
    return choose(dataset, rank_cpus(), most, _launched(), why_one=_why_one(options, dataset))


def _why_one(options: LoaderOptions, dataset: Any) -> str:
    """Return why a dataset that names no shards has one stream, as a clause; "" if its first stream shows the number.

    PyTorch's workers begin all at once, so that their first stream cannot show whether the dataset splits itself.
    """
    if isinstance(dataset, IterDataPipe):
        return "PyTorch's own workers read a DataPipe"
    is_read_by_dpex = options.distribute_mode is True or sys.platform == "linux"
    return "" if is_read_by_dpex else "it names no shards, and PyTorch's own workers would read it"


def _launched() -> Mapping[str, str]:
    """Return the launcher's environment, with the number of ranks from torch.distributed if that is initialised."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return os.environ
    return {**os.environ, "WORLD_SIZE": str(dist.get_world_size())}


def choose(dataset: Any, cpus: int, most: int | None, environ: Mapping[str, str], *, why_one: str = "") -> Streams:
    """Choose the number of streams for a rank with ``cpus``; see the module.

    most: ``AutotuneConfig.max_streams``. environ: a launcher's environment. why_one: why a dataset that names no shards
    is read in one stream, as a clause.
    """
    count, shards = cpus if most is None else most, named_shards(dataset, _ranks(environ))
    reason = f"this rank has {plural(cpus, 'CPU')}" if most is None else f"max_streams={most} says so"
    if shards is not None and shards < count:
        count, reason = shards, f"the dataset names {plural(shards, 'shard')}"
    elif why_one and count > 1 and shards is None:
        count, reason = 1, why_one
    is_certain = shards is not None or count == 1
    why = f"The dataset is read in {plural(count, 'stream')}, as {reason}"
    if is_certain:
        why += "."
    else:
        why += ", if it reads id or num_workers of get_worker_info() before its first sample, and in one stream if not."
    if most is None and shards != count and _spans_machines(environ):
        why += " Where machines differ in CPUs, give AutotuneConfig(max_streams=...): all ranks need the same number."
    return Streams(count=count, why=why, is_certain=is_certain)


def _ranks(environ: Mapping[str, str]) -> int:
    world = environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() and int(world) else 1


def _spans_machines(environ: Mapping[str, str]) -> bool:
    """Return True if a launcher says that there are ranks on other machines."""
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    return world.isdigit() and local.isdigit() and int(world) > int(local)
