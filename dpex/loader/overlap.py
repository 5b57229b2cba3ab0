"""``overlap_epochs``: whether a loader's workers make the first batches of its next epoch ahead, and if not, why."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpex.device.feed import Feed
    from dpex.engine.next_epoch import OverlapRecord
    from dpex.loader.sizing import Sizing


def overlap_of(loader: Any, sizing: Sizing, feed: Feed | None) -> OverlapRecord:
    """Return where the loader's predictions are recorded. It says why there can be none, if so."""
    from dpex.engine.next_epoch import OverlapRecord

    runtime = loader._runtime
    if runtime.overlap is None:
        runtime.overlap = OverlapRecord()
    record: OverlapRecord = runtime.overlap
    record.why_not = _why_not(loader, sizing, feed) or ("" if loader.persistent_workers else record.why_unknown)
    return record


def _why_not(loader: Any, sizing: Sizing, feed: Feed | None) -> str:
    from dpex.engine.next_epoch import why_unpredictable

    if sizing.is_iterable:
        return "an iterable dataset decides itself what its next epoch is"
    if loader.seeding != "batch":
        return "under seeding='worker' the random numbers of an epoch continue those of the one before"
    if loader.worker_config.share is not None:
        return "batches are shared with other trainings, which may be in other epochs"
    if type(loader).local_pool is not None:
        return f"{type(loader).__name__}.local_pool makes its workers"
    if loader.sample_policy.is_on:
        return "samples that fail in batches made ahead would count although they may be dropped"
    if not loader.persistent_workers and feed is not None:
        return "batches for a device need persistent_workers=True"
    if not loader.persistent_workers and loader.worker_init_fn is not None:
        return "worker_init_fn is to be called in each epoch: give persistent_workers=True"
    return why_unpredictable(loader._index_sampler)
