"""What one pass over a loader is made of: its iterator where there are no workers of dpex's own, else its pools."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from torch.utils.data import MapDataPipe

from dpex._torch import BaseDataLoaderIter, DatasetKind
from dpex.engine.drawing import draws_ahead_safely
from dpex.engine.sample_errors import policy_of
from dpex.errors import OptionError
from dpex.iterators.in_process import (
    _DpexInlineDataLoaderIter,
    _DpexMeteredUnmarkedDataLoaderIter,
    _DpexUnmarkedDataLoaderIter,
    _MeteredInlineDataLoaderIter,
)
from dpex.iterators.with_workers import _DpexDataLoaderIter, _DpexMapDataLoaderIter
from dpex.loader.runtime import LoaderRuntime
from dpex.loader.sizing import SizeOptions, is_split
from dpex.loader.split_iterator import SplitDataLoaderIter
from dpex.pools.factory import PoolFactory
from dpex.pools.local.clean_fork_server import start_early, usable_context
from dpex.pools.local.packing import Packing
from dpex.pools.share.opening import Share
from dpex.system.cpus import rank_cpus
from dpex.system.ray_package import is_ray_connected
from dpex.worker.own_generators import own_generators, registered, warn_of_unseeded
from dpex.worker.threads import declares_thread_safe
from dpex.worker.torch_workers import SeededInProcessIter, SeededWorkersIter

if TYPE_CHECKING:
    from dpex.telemetry.loader_metrics import LoaderMetrics


def inline_iterator(
    loader: Any, runtime: LoaderRuntime, metrics: LoaderMetrics | None, *, is_counted: bool
) -> _DpexInlineDataLoaderIter:
    """Batches made in the training process as torch makes them; counted where somebody wants to know."""
    may_warn = loader._dataset_kind == DatasetKind.Iterable and loader._IterableDataset_len_called is not None
    if not is_counted:
        plain = _DpexInlineDataLoaderIter if may_warn else _DpexUnmarkedDataLoaderIter
        return plain(loader, runtime.arenas, runtime.take_resume())
    metered = _MeteredInlineDataLoaderIter if may_warn else _DpexMeteredUnmarkedDataLoaderIter
    return metered(loader, runtime.arenas, runtime.take_resume(), metrics, runtime.counters)


def iterator_class(options: SizeOptions) -> type[_DpexDataLoaderIter]:
    """The class of iterators that have workers of dpex's own."""
    if options.is_split:
        return SplitDataLoaderIter
    return _DpexDataLoaderIter if options.is_iterable else _DpexMapDataLoaderIter


def torchs_seeded_iterator(loader: Any) -> BaseDataLoaderIter:
    """torch's own for ``seeding="batch"``."""
    if loader.num_workers == 0:
        return SeededInProcessIter(loader)
    loader.check_worker_number_rationality()
    return SeededWorkersIter(loader)


def pool_factory(loader: Any, runtime: LoaderRuntime) -> PoolFactory:
    """How this loader starts workers."""
    if runtime.packing is None:
        runtime.packing = Packing(rank_cpus() if _may_use_threads(loader) else None)
        if loader.seeding == "batch" and (loader._dataset_kind == DatasetKind.Map or is_split(loader)):
            warn_of_unseeded(loader.dataset, loader.collate_fn, registered())
    runtime.passes += 1
    share = None
    if loader.share is not None:
        share = Share(
            name=loader.share,
            kept_bytes=loader.share_bytes,
            passes_before=runtime.passes - 1,
            index_sampler=loader._index_sampler,
        )
    return PoolFactory(
        share=share,
        multiprocessing_context=loader.multiprocessing_context,
        head_address=loader.head_address,
        ray_remote_args=loader.ray_remote_args,
        packing=runtime.packing,
        counts_from_zero=loader._dataset_kind == DatasetKind.Map and draws_ahead_safely(loader._index_sampler),
    )


def check_thread_safe(loader: Any) -> None:
    """Raise OptionError where workers that are threads were asked for and cannot be had."""
    if loader.thread_safe and loader._dataset_kind == DatasetKind.Iterable:
        raise OptionError(
            "thread_safe=True: workers of an IterableDataset each have a stream, and a process, of their own; "
            "leave it out, or use a map-style dataset"
        )


def check_share(loader: Any) -> None:
    """Raise OptionError where batches are to be shared and cannot be."""
    if loader.share is None:
        return
    why = ""
    if loader._dataset_kind == DatasetKind.Iterable:
        why = "each worker of an IterableDataset reads a stream of its own: use a map-style dataset"
    elif loader.num_workers == 0:
        why = "with num_workers=0 each training makes its own batches: give a number of workers, or 'auto'"
    elif sys.platform != "linux":
        why = f"dpex's own workers need Linux, and this is {sys.platform}"
    elif not _is_forking(loader):
        why = "the process that makes the batches is forked: give multiprocessing_context='fork'"
    if why:
        raise OptionError(f"share={loader.share!r}: {why}; or leave it out")


def check_samples(loader: Any) -> None:
    """Raise OptionError where samples cannot be looked after one by one, and that was asked for."""
    policy = policy_of(loader)
    if not policy.is_on:
        return
    why = ""
    if loader._dataset_kind == DatasetKind.Iterable or isinstance(loader.dataset, MapDataPipe):
        why = "what a stream goes on with after an error is its own matter: use a map-style dataset"
    elif sys.platform != "linux":
        why = f"dpex's own workers need Linux, and this is {sys.platform}"
    elif policy.timeout_s is not None and loader.num_workers == 0:
        why = "the training process cannot be ended for a sample that hangs: give a number of workers, or 'auto'"
    if why:
        said = [f"on_sample_error={policy.on_error!r}"] if policy.tolerates else []
        said += [f"sample_timeout_s={policy.timeout_s!r}"] if policy.timeout_s is not None else []
        raise OptionError(f"{', '.join(said)}: {why}; or leave it out")


def start_fork_server_early(loader: Any) -> None:
    """Under Ray, before the dataset is used: what workers are forked from has to be a process without Ray's threads."""
    may_be_local = loader.num_workers and loader.local_engine == "dpex" and loader.distribute_mode is not True
    if may_be_local and is_ray_connected():
        start_early(loader.multiprocessing_context)


def _may_use_threads(loader: Any) -> bool:
    if loader.seeding != "batch" or loader._dataset_kind == DatasetKind.Iterable or loader.sample_timeout_s:
        return False
    if not (declares_thread_safe(loader.dataset) if loader.thread_safe is None else loader.thread_safe):
        return False
    return own_generators(loader.dataset, loader.collate_fn, registered()) is None  # threads would share them


def may_stand_in(loader: Any) -> bool:
    """Whether the training process may make batches in place of workers that are on their way."""
    with_gpu = bool((loader.ray_remote_args or {}).get("num_gpus"))
    is_bound_to_workers = loader.worker_init_fn is not None or loader.timeout or policy_of(loader).is_on or with_gpu
    can = loader.local_while_starting and not is_bound_to_workers
    return bool(can and (loader.seeding == "batch" or _is_forking(loader)))


def _is_forking(loader: Any) -> bool:
    """Whether local workers begin as copies of this process: who chose another way keeps the dataset out of it."""
    return bool(usable_context(loader.multiprocessing_context).get_start_method() == "fork")
