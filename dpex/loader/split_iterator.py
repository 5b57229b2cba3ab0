"""A pass over a stream that some workers read and others decode.

The pass chains two dpex iterators. The reading iterator has ``num_workers`` logical workers, which read and group
samples as torch's workers would, but send each group without collating it. The decoding iterator receives the groups in
torch's order, in place of indices, and any of its workers makes a batch from a group. Reading workers run only on this
machine, because on a cluster they could take the CPUs of decoding workers.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from dpex._torch import DatasetKind
from dpex.engine.pass_state import PassRecorder, PassState, point_for
from dpex.engine.read_batches import ReadBatches
from dpex.engine.with_workers import _DpexDataLoaderIter
from dpex.measure.settings import Settings
from dpex.worker.decoded_stream import Decoding, pickled, pickled_alone, raw_stream_of

RAW_RATIO = 0.25
"""Part of a ``memory_budget`` for samples that were read and not yet taken by the decoding iterator. They are smaller
than decoded samples: otherwise, sending them to other workers would not pay."""


class _LoaderView:
    """A loader with replaced attributes."""

    def __init__(self, loader: Any, **others: Any) -> None:
        vars(self).update(others)
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


class SplitDataLoaderIter(_DpexDataLoaderIter):
    """See the module. Only the decoding workers are listed and measured. The state comes from both iterators."""

    def __init__(
        self,
        loader: Any,
        make_pool: Any,
        settings: Settings,
        *others: Any,
        resume: PassState | None = None,
        **options: Any,
    ) -> None:
        readers = Settings(local=loader.num_workers, prefetch=loader.num_workers * loader.prefetch_factor)
        self._reader = _DpexDataLoaderIter(_reading(loader), make_pool, readers, resume=_read_part(resume))
        self._goes_on = resume
        super().__init__(_decoding(loader, int(self._reader._base_seed)), make_pool, settings, *others, **options)
        self._dataset_kind = DatasetKind.Iterable  # so `__next__` warns of more samples than `len`, as in torch

    def _reset(self, loader: Any, first_iter: bool = False) -> None:
        if first_iter:
            self._resume, self._goes_on = self._goes_on, None
        else:
            self._reader._reset(loader)
        super()._reset(loader, first_iter)

    def _new_draws(self, resume: PassState | None) -> Any:
        point = point_for(resume)
        return ReadBatches(self._reader._engine, 0 if point is None else point.first)

    def _new_recorder(self, loader: Any) -> PassRecorder:
        return self._reader._recorder

    def ask_states(self) -> None:
        """See `_DpexDataLoaderIter.ask_states`: only the reading workers have states."""
        self._reader._recorder.has_finished = self._recorder.has_finished
        self._reader.ask_states()

    def _shutdown_workers(self) -> None:
        super()._shutdown_workers()
        self._reader._shutdown_workers()


def _read_part(resume: PassState | None) -> PassState | None:
    if resume is None or resume.point.read is None:
        return None
    return replace(resume, point=resume.point.read)


def _reading(loader: Any) -> _LoaderView:
    budget = loader.worker_config.memory_budget
    return _LoaderView(
        loader,
        dataset=raw_stream_of(loader.dataset),
        collate_fn=pickled if loader._auto_collation else pickled_alone,
        seeding="worker",
        pin_memory=False,
        timeout=0,
        device_config=replace(loader.device_config, transform=None),
        worker_config=replace(
            loader.worker_config, memory_budget=None if budget is None else max(1, int(budget * RAW_RATIO))
        ),
    )


def _decoding(loader: Any, base_seed: int) -> _LoaderView:
    """``base_seed`` is the reading iterator's, because torch draws only one base seed from the loader's generator."""
    budget = loader.worker_config.memory_budget
    return _LoaderView(
        loader,
        dataset=Decoding(loader.dataset),
        _dataset_kind=DatasetKind.Map,
        generator=torch.Generator().manual_seed(base_seed),
        worker_config=replace(
            loader.worker_config, memory_budget=None if budget is None else max(1, budget - int(budget * RAW_RATIO))
        ),
    )
