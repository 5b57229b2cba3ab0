"""Choose how many streams an iterable dataset has under ``num_workers="auto"``. PURE.

The number of streams decides what is read: each worker iterates the dataset for itself, and what it yields depends on
how many there are. So it is chosen once, from what all ranks see alike, and never tuned:

- as many as `AutotuneConfig.max_streams` says, else one for each CPU of this rank (the CPUs that the process may use,
  shared among the ranks of this machine);
- at most the shards that the dataset names, as beyond these a stream would have nothing to read. Of a pipeline of
  webdataset these are its URLs, and where it gives each rank some of them, as many as every rank has.

A dataset that names its shards splits itself. Of any other, the first stream shows whether it does
(`dpex.core.first_stream`), and it is read in one stream if not.

No other rank is asked. Ranks on machines with different CPUs choose different numbers unless ``max_streams`` is given.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from dpex.core.probing import attribute

logger = logging.getLogger("dpex")

NAMES_OF_SHARDS = ("num_shards", "n_shards")
"""Attributes by which datasets (those of Hugging Face, for one) tell how many shards there are for this rank."""
_LIST_OF_URLS, _SPLITS_BY_RANK = "SimpleShardList", "split_by_node"
"""Of webdataset: the class that lists each URL once, and the function that gives each rank some of them."""


@dataclass(frozen=True, kw_only=True)
class Streams:
    """How many streams, the reason in a clause, and all of it in sentences.

    is_certain: they all begin at once; else there are so many only if the first shows that the dataset splits itself.
    """

    count: int
    reason: str
    why: str
    is_certain: bool = True

    @property
    def number(self) -> str:
        """How many, as a sentence."""
        return _number(self.count, self.reason, is_certain=self.is_certain)


def named_shards(dataset: Any, ranks: int = 1) -> int | None:
    """How many shards a dataset says it has for each of the ``ranks``; None if it does not say."""
    for name in NAMES_OF_SHARDS:
        try:
            value = getattr(dataset, name, None)
        except Exception as error:  # a property may do anything, and nothing depends on it
            logger.info("auto: %s of the dataset could not be read (%r)", name, error)
            continue
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return _for_every_rank(dataset, value)
    return _listed_urls(dataset, ranks)


def _for_every_rank(dataset: Any, shards: int) -> int:
    """The shards that every rank has, where Hugging Face's ``split_dataset_by_node`` gives some ranks one more."""
    ranks = attribute(dataset, "_distributed")
    if attribute(ranks, "strategy", "") != "shards":
        return shards
    return int(max(1, dataset._ex_iterable.num_shards // ranks.world_size))


def _listed_urls(dataset: Any, ranks: int) -> int | None:
    """How many URLs a pipeline of webdataset (1.0) has for each rank; None of one that draws them without an end."""
    stages = attribute(dataset, "pipeline")
    if not isinstance(stages, list) or not stages or type(stages[0]).__name__ != _LIST_OF_URLS:
        return None
    urls = getattr(stages[0], "urls", None)
    if not isinstance(urls, list) or not urls:
        return None
    is_split = any(getattr(stage, "__name__", "") == _SPLITS_BY_RANK for stage in stages)
    return max(1, len(urls) // ranks) if is_split else len(urls)


def choose(
    dataset: Any,
    cpus: int,
    most: int | None,
    environ: Mapping[str, str],
    *,
    is_split: bool = False,
    why_one: str = "",
) -> Streams:
    """See the module.

    cpus: of this rank. most: ``AutotuneConfig.max_streams``. environ: a launcher's. is_split: the dataset is known to
    split itself without that it names shards. why_one: why it cannot be found out whether it does, in a clause; it is
    read in one stream then.
    """
    count, shards = cpus if most is None else most, named_shards(dataset, _ranks(environ))
    reason = f"this rank has {plural(cpus, 'CPU')}" if most is None else f"max_streams={most} says so"
    is_split = is_split or shards is not None
    if shards is not None and shards < count:
        count, reason = shards, f"the dataset names {plural(shards, 'shard')}"
    elif why_one and count > 1 and not is_split:
        count, reason = 1, why_one
    is_certain = is_split or count == 1
    why = (
        f"{_number(count, reason, is_certain=is_certain)} The number decides what each worker reads, so it is not "
        "tuned; only the prefetch is."
    )
    if most is None and shards != count and _spans_machines(environ):
        why += " Where machines differ in CPUs, give AutotuneConfig(max_streams=...): all ranks need the same number."
    return Streams(count=count, reason=reason, why=why, is_certain=is_certain)


def _number(count: int, reason: str, *, is_certain: bool) -> str:
    if is_certain:
        return f"The dataset is read in {plural(count, 'stream')}, as {reason}."
    return (
        f"The dataset is read in {plural(count, 'stream')}, as {reason}, if it reads id or num_workers of "
        "get_worker_info() before its first sample, and in one stream if not."
    )


def _ranks(environ: Mapping[str, str]) -> int:
    world = environ.get("WORLD_SIZE", "")
    return int(world) if world.isdigit() and int(world) else 1


def _spans_machines(environ: Mapping[str, str]) -> bool:
    """Whether a launcher says that there are ranks on other machines."""
    world, local = environ.get("WORLD_SIZE", ""), environ.get("LOCAL_WORLD_SIZE", "")
    return world.isdigit() and local.isdigit() and int(world) > int(local)


def plural(count: int, what: str) -> str:
    """A count and what is counted: "1 stream", "2 streams"."""
    return f"{count} {what}{'' if count == 1 else 's'}"
