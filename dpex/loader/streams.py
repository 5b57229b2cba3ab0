"""The number of streams of an iterable dataset under ``num_workers="auto"``.

Each worker iterates an iterable dataset for itself, and its samples may depend on the number of workers. So under
``num_workers="auto"`` the number of these streams is chosen once (`choose_streams`) and is never tuned:

- It is the number of shards that the dataset names, because a dataset that names shards splits itself among workers. A
  dataset of Hugging Face names this rank's shards. A pipeline of webdataset names its URLs. If the pipeline divides the
  URLs among the ranks, the number is the URLs over the ranks, rounded down.
- It is at most `AutotuneConfig.max_streams`. Without that, it is at most `STREAMS`, or one for each CPU of this rank if
  that is more (the CPUs that the process may use, shared among the ranks of this machine). Ranks on machines with
  different numbers of CPUs, above `STREAMS`, then choose different numbers of streams.
- It is one for a dataset that names no shards, because more streams might repeat its samples. `iter()` then warns.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch.utils.data import IterableDataset

from dpex.autotune.config import AutotuneConfig
from dpex.measure.readable import plural
from dpex.options import LoaderOptions
from dpex.schedule.names import attribute
from dpex.system.cpus import rank_cpus, ranks

STREAMS = 8
"""Maximum streams of a rank with fewer CPUs than this. On two CPUs, 8 streams are 3.9 times as fast as 2 if samples
wait (2 ms each), and 0 to 8 % slower if they compute (0.5 ms each). A stream takes 15 MB. (2026-11-29)"""
NAMES_OF_SHARDS = ("num_shards", "n_shards")
"""Attributes that name the number of shards for this rank, as in datasets of Hugging Face."""
_UNNAMED = (
    "num_workers='auto': {kind} names no shards (num_shards, n_shards, or the URLs of webdataset), so one worker reads "
    "it. If it splits itself among workers, as by get_worker_info(), give {remedy}. "
    "autotune=AutotuneConfig(max_streams=1) keeps one worker without this warning"
)
_SPLITS_BY_RANK = "split_by_node"
"""webdataset's function that gives each rank some of the URLs."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """A number of streams, and its reason."""

    count: int
    """The number of streams."""
    why: str
    """The number and the reason, in sentences."""
    warning: str = ""
    """The text for the user, if the user could give a number of workers that reads faster; else ""."""


def named_shards(dataset: Any, ranks: int = 1) -> int | None:
    """Return the number of shards that a dataset names for each of the ``ranks``; None if it names none."""
    for name in NAMES_OF_SHARDS:
        value = attribute(dataset, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return _listed_urls(dataset, ranks)


def _listed_urls(dataset: Any, ranks: int) -> int | None:
    """Return the number of URLs of a webdataset pipeline (1.0) for each rank; None if it draws URLs without an end."""
    stages = attribute(dataset, "pipeline")
    if not isinstance(stages, list) or not stages:
        return None
    urls = attribute(stages[0], "urls")
    if not isinstance(urls, list) or not urls or not hasattr(type(stages[0]), "__len__"):
        return None
    is_split = any(getattr(stage, "__name__", "") == _SPLITS_BY_RANK for stage in stages)
    return max(1, len(urls) // ranks) if is_split else len(urls)


def streams_of(options: LoaderOptions, dataset: Any) -> Streams | None:
    """Return the number of streams under ``num_workers="auto"``; None for a dataset that is not iterable."""
    if not isinstance(dataset, IterableDataset):
        return None
    autotune = options.autotune
    most = autotune.max_streams if isinstance(autotune, AutotuneConfig) else None
    return choose_streams(dataset, rank_cpus(), most, launcher_environment())


def launcher_environment() -> Mapping[str, str]:
    """Return the launcher's environment, with the number of ranks from torch.distributed if that is initialised."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return os.environ
    return {**os.environ, "WORLD_SIZE": str(dist.get_world_size())}


def choose_streams(dataset: Any, cpus: int, most: int | None, environ: Mapping[str, str]) -> Streams:
    """Choose the number of streams for a rank with ``cpus``; see the module.

    Args:
        dataset: An iterable dataset.
        cpus: The CPUs of this rank.
        most: ``AutotuneConfig.max_streams``.
        environ: A launcher's environment.
    """
    shards = named_shards(dataset, ranks(environ))
    if shards is None:
        own = cpus if most is None else most
        source = _source_of(dataset)
        remedy = f"num_workers={own}" + ("" if source is dataset else ", autotune=AutotuneConfig()")
        warning = "" if own == 1 else _UNNAMED.format(kind=type(source).__name__, remedy=remedy)
        return Streams(count=1, why=describe_streams(1, 0, "it names no shards"), warning=warning)
    limit = max(STREAMS, cpus) if most is None else most
    if shards <= limit:
        return Streams(
            count=shards, why=describe_streams(shards, shards, f"the dataset names {plural(shards, 'shard')}")
        )
    if most is not None:
        return Streams(count=most, why=describe_streams(most, shards, f"max_streams={most} says so"))
    reason = f"that is the larger of {STREAMS} and this rank's {plural(cpus, 'CPU')}"
    remedy = "AutotuneConfig(max_streams=...) sets another number"
    return Streams(count=limit, why=describe_streams(limit, shards, f"{reason}; {remedy}"))


def _source_of(dataset: Any) -> Any:
    """Return the user's dataset. For a `DecodedStream`, that is its ``source``."""
    from dpex.worker.decoded_stream import DecodedStream

    return dataset.source if isinstance(dataset, DecodedStream) else dataset


def describe_streams(count: int, shards: int, reason: str) -> str:
    of_shards = f" for its {shards} shards" if shards > count else ""
    return f"The dataset is read in {plural(count, 'stream')}{of_shards}, as {reason}."
