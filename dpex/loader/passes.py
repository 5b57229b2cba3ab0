"""Create the iterator of a pass over a loader, with its pools of workers and the metrics that it updates."""

from __future__ import annotations

import logging
import os
import sys
import weakref
from collections.abc import Callable
from multiprocessing import spawn
from typing import TYPE_CHECKING, Any

from dpex._torch import BaseDataLoaderIter, DatasetKind
from dpex.loader.checks import start_fork_server_early
from dpex.loader.sizing import Sizing, stay_in_process_if_daemonic
from dpex.loader.streams import Streams
from dpex.schedule.names import encodable, is_asynchronous
from dpex.system.compiler import untraced
from dpex.system.ray_package import is_ray_connected
from dpex.system.user_warnings import is_first, warn

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.diagnose.diagnosis import DiagnosisSource
    from dpex.engine.pass_state import PassState
    from dpex.loader.base_loader import BaseLoader
    from dpex.pools.factory import PoolFactory
    from dpex.telemetry.loader_metrics import LoaderMetrics

logger: logging.Logger = logging.getLogger("dpex")
Torchs = Callable[[], BaseDataLoaderIter]


def new_iterator(loader: BaseLoader[Any], torchs: Torchs) -> BaseDataLoaderIter:
    """Return the iterator of a new pass.

    torchs: Returns torch's own iterator for the loader. Under ``dpex run`` it has an attribute ``report``, a function
    that is called with each loader that has made an iterator.

    Raises:
        RuntimeError: The script lacks a main guard: a process that `multiprocessing` started would train, too, when it
            imports the script. `multiprocessing` raises the same error.
    """
    if loader.num_workers:
        spawn._check_not_importing_main()  # type: ignore[attr-defined]
    report = getattr(torchs, "report", None)
    loader._runtime.is_diagnosed |= report is not None  # batches made in the training process are counted, too
    iterator = _with_feed(loader, torchs)
    if report is not None:
        report(loader)
    return iterator


def _with_feed(loader: BaseLoader[Any], torchs: Torchs) -> BaseDataLoaderIter:
    if loader.device is None:
        return _without_feed(loader, torchs, None)
    from dpex.device.feed import have_fed, open_feed
    from dpex.engine.with_workers import _DpexDataLoaderIter

    transform = loader.device_config.transform
    feed = open_feed(loader.device, loader.device_config.budget_bytes, transform)
    iterator = _without_feed(loader, torchs, feed)
    if feed is None or isinstance(iterator, _DpexDataLoaderIter):  # dpex's own class uses the feed itself
        return iterator
    return have_fed(iterator, feed, transform)


def _without_feed(loader: BaseLoader[Any], torchs: Torchs, feed: Feed | None) -> BaseDataLoaderIter:
    stay_in_process_if_daemonic(loader)
    sizing = Sizing(loader)
    streams: Streams | None = loader._streams
    if loader._is_auto and streams is not None and streams.warning and is_first(streams.warning):
        warn(streams.warning, UserWarning)
    if sizing.is_piped:
        return torchs()
    if loader.distribute_mode == "auto" and loader.head_address != "auto" and loader.num_workers:
        loader._runtime.join_cluster(loader.head_address)
    tuner, settings = sizing.tuner(), sizing.current_settings()
    if settings.remote == 0 and tuner is None and sizing.why_torch is not None:
        logger.info("PyTorch's own iterators make the batches: %s", sizing.why_torch)
        if loader.seeding == "batch" and not (sizing.is_iterable or loader._is_auto):
            warn(f"seeding='batch' needs dpex's own workers ({sizing.why_torch}): batches have torch's random numbers")
        return torchs()
    if loader.num_workers == 0:
        return _in_process(loader)
    loader.check_worker_number_rationality()
    runtime = loader._runtime
    may_be_remote = settings.remote > 0 or (tuner is not None and sizing.untuned_settings().remote > 0)
    connects_later = may_be_remote and not settings.remote and not is_ray_connected()
    if may_be_remote and not connects_later:
        runtime.hold_cluster(loader.head_address)
    metrics = _exported(loader)
    from dpex.engine.with_workers import Observers

    observers = Observers(tuner=tuner, metrics=metrics, counters=runtime.counters)
    make_pool, resume = _pool_factory(loader), runtime.pop_resume_state()
    iterator = _iterator_class(sizing)(loader, make_pool, settings, observers, feed=feed, resume=resume)
    runtime.iterators.add(iterator)
    iterator._engine.record(runtime.timeline)
    if connects_later:
        _connect_beside(iterator, loader, resume)
    latest: BaseDataLoaderIter = runtime.set_latest(iterator)
    return latest


def _connect_beside(iterator: Any, loader: BaseLoader[Any], resume: PassState | None) -> None:
    """Connect to the cluster while the iterator's local workers, forked before Ray had threads, make batches."""
    runtime = loader._runtime
    try:
        runtime.hold_cluster(loader.head_address)
    except BaseException:
        iterator._shutdown_workers()
        runtime.resume = resume
        raise
    start_fork_server_early(loader)  # for the templates of later passes


def _iterator_class(sizing: Sizing) -> Any:
    """Return the class of iterators that have workers of dpex's own."""
    if sizing.is_split:
        from dpex.loader.split_iterator import SplitDataLoaderIter

        return SplitDataLoaderIter
    from dpex.engine.with_workers import _DpexDataLoaderIter

    return _DpexDataLoaderIter


def _in_process(loader: BaseLoader[Any]) -> BaseDataLoaderIter:
    """Return an iterator that makes its batches in this process. It is measured only for metrics or a diagnosis."""
    from dpex.engine.in_process import in_process_kind

    runtime, metrics = loader._runtime, _exported(loader)
    is_measured = metrics is not None or runtime.is_diagnosed
    iterator = in_process_kind(loader)(loader, runtime.arenas, runtime.pop_resume_state(), is_measured=is_measured)
    if iterator.meter is not None:
        if metrics is not None:
            weakref.finalize(iterator, untraced(metrics.add_iterator(iterator.meter).freeze))
        weakref.finalize(iterator, untraced(runtime.counters.add_iterator(iterator.meter).freeze))
    latest: BaseDataLoaderIter = runtime.set_latest(iterator)
    return latest


def _pool_factory(loader: BaseLoader[Any]) -> PoolFactory:
    from dpex.engine.samplers import draws_ahead_safely
    from dpex.pools.factory import PoolFactory

    runtime, config = loader._runtime, loader.worker_config
    runtime.passes += 1
    share = None
    if config.share is not None and config.share_bytes is not None:
        from dpex.pools.share.opening import Share

        share = Share(
            name=config.share,
            kept_bytes=config.share_bytes,
            rank=config.share_rank,
            passes_before=runtime.passes - 1,
        )
    return PoolFactory(
        share=share,
        own_pool=vars(loader).get("local_pool", type(loader).local_pool),
        multiprocessing_context=loader.multiprocessing_context,
        head_address=loader.head_address,
        ray_remote_args=loader.cluster_config.ray_remote_args,
        counts_from_zero=loader._dataset_kind == DatasetKind.Map and draws_ahead_safely(loader._index_sampler),
    )


# -- counts ------------------------------------------------------------------------------------------------------------


def _exported(loader: BaseLoader[Any]) -> LoaderMetrics | None:
    """Return the metrics that this loader's iterators count for; None if they are not exported."""
    runtime = loader._runtime
    metrics: LoaderMetrics | None = runtime.metrics(
        loader, (type(loader.dataset).__name__, str(loader.batch_size), str(loader.seeding))
    )
    if metrics is not None:
        metrics.tuner, metrics.case = runtime.tuner, diagnosis_source(loader)
        metrics.cache_bytes = _cache_bytes_of(loader.dataset)
    return metrics


def _cache_bytes_of(dataset: Any) -> Callable[[], dict[str, Any]]:
    """Return a function that returns the sizes of the caches in a dataset. It does not keep the dataset alive."""
    if "dpex.cache.dataset" not in sys.modules:
        return dict
    from dpex.cache.within import bytes_of

    return bytes_of(dataset)


def diagnosis_source(loader: BaseLoader[Any]) -> DiagnosisSource:
    """Return the counts of all iterators so far, and facts of the loader. The result keeps no loader alive."""
    from dpex.diagnose.diagnosis import DiagnosisSource
    from dpex.diagnose.facts import Subject
    from dpex.loader.held_objects import largest_container
    from dpex.profile.live_timer import SWITCH, is_switched_on
    from dpex.system.cpus import rank

    runtime, sizing = loader._runtime, Sizing(loader)
    subject = Subject(
        name=encodable(loader.name or ""),
        rank=rank(os.environ),
        dataset=encodable(type(loader.dataset).__name__),
        batch_size=str(loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)),
        is_cachable=_is_cachable(loader.dataset),
        is_tuned=runtime.tuner is not None,
        keeps_workers=sizing.is_iterable,
        streams=loader.num_workers if sizing.reads_streams else 0,
        shards=sizing.shards(),
        why_streams=sizing.why_streams(),
        is_auto=loader._is_auto,
        has_cluster=sizing.may_be_remote,
        note=_why_unmeasured(loader, sizing),
        untimed="" if is_switched_on(os.environ) else f"${SWITCH} forbids it",
        is_torchs=_is_torchs(sizing),
        held=largest_container(loader.dataset),
        is_asynchronous=is_asynchronous(loader.dataset),
        concurrency=loader.worker_config.concurrency if loader._dataset_kind == DatasetKind.Map else 0,
    )
    return DiagnosisSource(book=runtime.counters, subject=subject, tuner=runtime.tuner)


def _is_cachable(dataset: Any) -> bool:
    from dpex.cache.preparing import is_cachable

    try:
        return is_cachable(dataset)
    except Exception:  # a lazy proxy may fail to load its object in this process
        return False


def _is_torchs(sizing: Sizing) -> bool:
    """Return True if PyTorch's own iterators make the batches."""
    return sizing.why_torch is not None or sizing.is_piped


def _why_unmeasured(loader: BaseLoader[Any], sizing: Sizing) -> str:
    """Name the unmeasured part of a run, with the reason, for a report without a counted batch."""
    if _is_torchs(sizing):
        return "anything: PyTorch's own iterators make the batches of this loader"
    if not loader._runtime.is_diagnosed and loader.num_workers == 0:
        return "epochs before this call: without workers it is measured from the next iter() on, or under dpex diagnose"
    return "anything: no batch was delivered yet"
