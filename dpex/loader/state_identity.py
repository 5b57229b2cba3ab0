"""Of which loader a state is: data set, batch size, order, seeds. A state of another one is refused, in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DistributedSampler

from dpex._torch import DatasetKind
from dpex.engine.sampler_start import generators_of, samplers_within
from dpex.errors import StateError
from dpex.loader.sizing import is_split
from dpex.schedule.progress import ResumePoint
from dpex.schedule.streams import ALL, ONE

_WORDS = {
    "dataset": ("of the data set {0}", "it has the data set {0}", "load it with the data set that it was saved with"),
    "samples": ("of a data set of {0} samples", "its data set has {0}", "load it with the same samples"),
    "batch_size": ("of batch_size={0}", "it has batch_size={0}", "give it the same batch size"),
    "global_batch": (
        "of {0} samples in the batches of all ranks together",
        "its ranks have {0} together",
        "change the batch size with the number of ranks, or use dpex.ElasticDistributedSampler",
    ),
    "drop_last": ("of drop_last={0}", "it has drop_last={0}", "give it the same"),
    "sampler": ("of the sampler {0}", "it has the sampler {0}", "give it the same kind of sampler"),
    "seeding": ("of seeding={0!r}", "it has seeding={0!r}", "give it the same"),
    "workers": (
        "of num_workers={0}",
        "it has num_workers={0}",
        "give it the same number; with seeding='batch' a map-style data set may have any",
    ),
    "decoding": (
        "of a stream that is decoded by {0}",
        "its stream is decoded by {0}",
        "give its data set the same last stages, and num_workers, seeding and local_engine as they were",
    ),
    "seed": ("of the seed {0}", "it has the seed {0}", "give its generator, or its sampler, the same seed"),
}
"""What a state is of, what the loader has, and the remedy."""


def identity_of(loader: Any, point: ResumePoint | None = None) -> dict[str, Any]:
    """What makes a loader the one that a state is of, as plain values; ``point``: where it stands."""
    is_stream = loader._dataset_kind == DatasetKind.Iterable
    is_free = loader.seeding == "batch" and not is_stream
    found = {
        "dataset": type(loader.dataset).__qualname__,
        "samples": None if is_stream else _length(loader.dataset),
        "drop_last": bool(loader.drop_last),
        "sampler": None if is_stream else _kinds(loader._index_sampler),
        "seeding": loader.seeding,
        "decoding": ("others than read it" if is_split(loader) else "those who read it") if is_stream else None,
        "workers": None if is_free else 1 if _has_one_stream(point) else int(loader.num_workers),
        "seed": None if is_stream else _seeds(loader),
    }
    return found | _batch_size(loader)


def _has_one_stream(point: ResumePoint | None) -> bool:
    """Whether it was found that the dataset does not split itself."""
    return point is not None and ONE in (point.streams, ALL if point.read is None else point.read.streams)


def _may_have_one_stream(loader: Any) -> bool:
    streams = loader._streams
    return loader._is_auto and streams is not None and not streams.is_certain


def _length(dataset: Any) -> int | None:
    try:
        return len(dataset)
    except TypeError:
        return None


def _kinds(index_sampler: Any) -> str:
    return " of ".join(type(sampler).__name__ for _, sampler in samplers_within(index_sampler))


def _seeds(loader: Any) -> dict[str, int]:
    seeds = {name: each.initial_seed() for name, each in generators_of(loader._index_sampler, loader.generator).items()}
    for name, sampler in samplers_within(loader._index_sampler):
        if isinstance(sampler, DistributedSampler):
            seeds[name] = sampler.seed
    return seeds


def _batch_size(loader: Any) -> dict[str, Any]:
    distributed = [s for _, s in samplers_within(loader._index_sampler) if isinstance(s, DistributedSampler)]
    if not distributed or loader.batch_size is None:
        return {"batch_size": loader.batch_size}
    if getattr(distributed[0], "is_elastic", False):
        return {}
    return {"global_batch": loader.batch_size * distributed[0].num_replicas}


def check_identity(saved: Mapping[str, Any], loader: Any) -> None:
    """Raise StateError where a state is of another loader, naming what the state has and what the loader has."""
    found = identity_of(loader)
    for name, (of, has, remedy) in _WORDS.items():
        theirs, ours = saved.get(name), found.get(name)
        if name == "workers" and theirs == 1 and _may_have_one_stream(loader):
            continue
        if theirs != ours and not (name == "seed" and theirs is not None and _same_seeds(theirs, ours)):
            raise StateError(
                f"the state is {of.format(theirs)}, and the loader is another one: {has.format(ours)}; {remedy}"
            )


def _same_seeds(theirs: Mapping[str, int], ours: Mapping[str, int] | None) -> bool:
    return dict(theirs) == dict(ours or {})
