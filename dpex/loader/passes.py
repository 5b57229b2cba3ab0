"""What one pass over a loader is made of: its iterator where there are no workers of dpex's own, else its pools."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from dpex._torch import BaseDataLoaderIter, DatasetKind
from dpex.loader.sizing import SizeOptions, is_split

if TYPE_CHECKING:
    from dpex.engine.in_process import _DpexInlineDataLoaderIter
    from dpex.engine.with_workers import _DpexDataLoaderIter
    from dpex.loader.runtime import LoaderRuntime
    from dpex.pools.factory import PoolFactory
    from dpex.telemetry.loader_metrics import LoaderMetrics


def inline_iterator(
    loader: Any, runtime: LoaderRuntime, metrics: LoaderMetrics | None, *, is_counted: bool
) -> _DpexInlineDataLoaderIter:
    """Return an iterator whose batches are made in the training process; counted where somebody wants to know."""
    from dpex.engine import in_process

    arenas, resume = runtime.arenas, runtime.take_resume()
    iterator = (
        in_process._MeteredInlineDataLoaderIter(loader, arenas, resume, metrics, runtime.counters)
        if is_counted
        else in_process._DpexInlineDataLoaderIter(loader, arenas, resume)
    )
    iterator.seed_batches()
    return iterator


def iterator_class(options: SizeOptions) -> type[_DpexDataLoaderIter]:
    """The class of iterators that have workers of dpex's own."""
    if options.is_split:
        from dpex.loader.split_iterator import SplitDataLoaderIter

        return SplitDataLoaderIter
    from dpex.engine.with_workers import _DpexDataLoaderIter, _DpexMapDataLoaderIter

    return _DpexDataLoaderIter if options.is_iterable else _DpexMapDataLoaderIter


def torchs_seeded_iterator(loader: Any) -> BaseDataLoaderIter:
    """torch's own for ``seeding="batch"``."""
    from dpex.worker.torch_workers import SeededInProcessIter, SeededWorkersIter

    if loader.num_workers == 0:
        return SeededInProcessIter(loader)
    loader.check_worker_number_rationality()
    return SeededWorkersIter(loader)


def pool_factory(loader: Any, runtime: LoaderRuntime) -> PoolFactory:
    """How this loader starts workers."""
    from dpex.engine.drawing import draws_ahead_safely
    from dpex.pools.factory import PoolFactory
    from dpex.worker.own_generators import registered, warn_of_unseeded

    is_first = not runtime.passes
    if is_first and loader.seeding == "batch" and (loader._dataset_kind == DatasetKind.Map or is_split(loader)):
        warn_of_unseeded(loader.dataset, loader.collate_fn, registered())
    runtime.passes += 1
    share = None
    if loader.worker_config.share is not None:
        from dpex.pools.share.opening import Share

        share = Share(
            name=loader.worker_config.share,
            kept_bytes=loader.worker_config.share_bytes,
            passes_before=runtime.passes - 1,
            index_sampler=loader._index_sampler,
        )
    return PoolFactory(
        share=share,
        own_pool=type(loader).local_pool,
        multiprocessing_context=loader.multiprocessing_context,
        head_address=loader.head_address,
        ray_remote_args=loader.cluster_config.ray_remote_args,
        compression=loader.cluster_config.compression,
        counts_from_zero=loader._dataset_kind == DatasetKind.Map and draws_ahead_safely(loader._index_sampler),
    )
