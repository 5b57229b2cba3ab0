"""The parts of a pipeline of webdataset, seen with webdataset 1.0: all that reads, and the maps at its end.

The maps at the end (``decode``, ``map``, ``map_dict``, ``map_tuple``, ``to_tuple``, ``rename``) make one sample of
each, unless an error handler leaves some out: then the pipeline stays whole. A ``batched`` behind them is done in both
parts: samples are put together as they are read, and collated when they are decoded.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dpex.worker.stream_parts import Split

_WORK = ("_decode", "_map", "_map_dict", "_map_tuple")
_MAPS = (*_WORK, "_to_tuple", "_rename")
"""Functions of ``webdataset.filters`` that a stage may call; those of `_WORK` are worth workers of their own."""


def parts(dataset: Any) -> Split | None:
    """What reads and what decodes, or None: it is no such pipeline, or has no maps at its end."""
    package = sys.modules.get("webdataset")
    filters = getattr(package, "filters", None)
    pipeline_class = getattr(package, "DataPipeline", None)
    if filters is None or pipeline_class is None or not isinstance(dataset, pipeline_class):
        return None
    stages = list(dataset.pipeline)
    if not stages:
        return None
    batched = stages.pop() if _calls(stages[-1], filters, ("_batched",)) else None
    first = len(stages)
    while first > 1 and _is_map(stages[first - 1], filters):
        first -= 1
    maps = stages[first:]
    if not any(_calls(stage, filters, _WORK) for stage in maps):
        return None
    source = copy.copy(dataset)
    if batched is None:
        source.pipeline = stages[:first]
        return Split(source, _Stages(maps))
    size, collate, partial = _arguments_of_batched(batched, filters)
    source.pipeline = [*stages[:first], filters.batched(size, collation_fn=None, partial=partial)]
    return Split(source, _StagesOfBatches(_Stages(maps), collate))


class _Stages:
    """Stages, one after the other."""

    def __init__(self, stages: list[Any]) -> None:
        self._stages = stages

    def __call__(self, samples: Iterator[Any]) -> Iterable[Any]:
        made: Iterable[Any] = samples
        for stage in self._stages:
            made = stage(made)
        return made


class _StagesOfBatches:
    """Stages that are applied to the samples of each batch, which are collated then."""

    def __init__(self, maps: _Stages, collate: Callable[[Any], Any] | None) -> None:
        self._maps = maps
        self._collate = collate

    def __call__(self, batches: Iterator[Any]) -> Iterable[Any]:
        for batch in batches:
            made = list(self._maps(iter(batch)))
            yield made if self._collate is None else self._collate(made)


def _calls(stage: Any, filters: Any, names: tuple[str, ...]) -> bool:
    """Whether a stage of the pipeline is one of these functions of webdataset's."""
    return type(stage) is filters.FilterFunction and any(stage.f is getattr(filters, name, None) for name in names)


def _is_map(stage: Any, filters: Any) -> bool:
    if not _calls(stage, filters, _MAPS):
        return False
    is_handler_positional = stage.f is filters._map and len(stage.args) != 1
    return not is_handler_positional and stage.kw.get("handler", filters.reraise_exception) is filters.reraise_exception


def _arguments_of_batched(stage: Any, filters: Any) -> tuple[int, Any, bool]:
    """The size, the collate function and whether a smaller last batch is kept, as ``batched`` takes them."""
    given = dict(zip(("batchsize", "collation_fn", "partial"), stage.args, strict=False)) | stage.kw
    return (
        given.get("batchsize", 20),
        given.get("collation_fn", filters.default_collation_fn),
        given.get("partial", True),
    )
