"""A loader's numbers of local and remote workers, and its prefetch: from its arguments, from `resize`, or tuned.

A `Sizing` is created for each use, because frameworks may change a loader's attributes at any time. Its results depend
only on these attributes, the system and the environment.
"""

from __future__ import annotations

import logging
import multiprocessing
import sys
from collections.abc import Mapping
from dataclasses import replace
from operator import index
from pathlib import Path
from typing import TYPE_CHECKING, Any, SupportsIndex

from torch.utils.data import IterDataPipe, MapDataPipe

from dpex._torch import DatasetKind
from dpex.autotune.config import AutotuneConfig, limits_of, most_waiting
from dpex.errors import OptionError
from dpex.loader.streams import Streams, describe_streams, launcher_environment, named_shards
from dpex.measure.settings import KNOBS, LOCAL, REMOTE, WORKER_POOLS, Settings
from dpex.system.cpus import rank_cpus, ranks
from dpex.system.ray_package import is_ray_connected, require_ray
from dpex.system.user_warnings import warn

if TYPE_CHECKING:
    from dpex.autotune.limits import Limits
    from dpex.autotune.runtime.tuned import Tuned
    from dpex.autotune.runtime.tuner import Tuner
    from dpex.loader.base_loader import BaseLoader
    from dpex.stats import StreamStats

logger: logging.Logger = logging.getLogger("dpex")


class LeftOut(int):
    """The type of a ``prefetch_factor`` that the user did not give. Frameworks that rebuild a loader keep the type."""


TORCH_PREFETCH_FACTOR = LeftOut(2)
"""torch's default."""
_NOT_TUNED = "The number determines the samples of each worker, so it is not tuned; only the prefetch is."
_READING_NOT_TUNED = (
    "That number determines the samples of each stream, so it is not tuned. Other workers, whose number is tuned, "
    "decode the samples."
)


def given_prefetch(of_torchs: int | None) -> int | None:
    """Return the ``prefetch_factor`` that the user of a torch `DataLoader` gave. torch's default counts as not given
    (None), because the loader does not record whether the user gave it."""
    return None if of_torchs == TORCH_PREFETCH_FACTOR else of_torchs


class Sizing:
    """The settings of one loader, found from the loader's attributes.

    Attributes:
        is_split: Some workers read streams, others decode.
        is_iterable: Each worker reads and decodes a stream.
        is_piped: The dataset is a DataPipe.
        may_be_remote: Workers may be on the cluster.
        is_prefetch_given: The user gave a ``prefetch_factor``.
    """

    def __init__(self, loader: BaseLoader[Any]) -> None:
        self._loader = loader
        self._workers = int(loader.num_workers)
        self.is_split: bool = is_split(loader)
        self.is_iterable: bool = loader._dataset_kind == DatasetKind.Iterable and not self.is_split
        self.is_piped: bool = isinstance(loader.dataset, (IterDataPipe, MapDataPipe))
        self.may_be_remote: bool = loader.distribute_mode is not False
        self.is_prefetch_given: bool = not isinstance(loader.prefetch_factor, (LeftOut, type(None)))

    @property
    def why_torch(self) -> str | None:
        """The reason why PyTorch's own iterators do the local work; None if dpex's iterators do it."""
        return f"dpex's own workers need Linux, and this is {sys.platform}" if sys.platform != "linux" else None

    @property
    def is_tuned(self) -> bool:
        """Return True if a tuner changes the settings."""
        if not self._loader.autotune:
            return False
        if not self.may_be_remote and is_daemonic():
            return False
        return self._workers > 0 and not self.is_piped and self.why_torch is None

    @property
    def are_workers_fixed(self) -> bool:
        """Return True if the samples or the random numbers of a batch depend on the worker that makes it."""
        return self._loader.seeding == "worker" or self.is_iterable

    def check_recordable(self, path: str | Path) -> None:
        """Raise OptionError if the loader has no workers of dpex, because only these can record a timeline."""
        if self._workers == 0 or self.why_torch is not None or self.is_piped:
            raise OptionError(
                f"timeline({str(path)!r}): this loader has no workers of dpex's own, so there is nothing to record; "
                "give num_workers of at least 1, or 'auto'"
            )

    def tuner(self) -> Tuner | None:
        runtime = self._loader._runtime
        if runtime.tuner is None and self.is_tuned:
            runtime.tuner = self._new_tuner()
        tuner: Tuner | None = runtime.tuner
        return tuner

    def _new_tuner(self) -> Tuner:
        from dpex.autotune.constants import ROOM_EVERY_S
        from dpex.autotune.runtime.tuner import Tuner

        room, config = None, self._loader.autotune or AutotuneConfig()
        if self.may_be_remote:
            from dpex.pools.ray.room import RemoteRoom

            args = self._loader.cluster_config.ray_remote_args
            room = RemoteRoom(args, weight=config.cluster_weight, every_s=ROOM_EVERY_S)
        start = self.start_settings()
        return Tuner(config, start, self.limits(config, start), room=room, note=self._why_untuned())

    def current_settings(self) -> Settings:
        tuner = self.tuner()
        if tuner is not None:
            return tuner.settings
        resized: Settings | None = self._loader._settings
        return self.untuned_settings() if resized is None else resized

    def tuned(self) -> Tuned:
        """See `dpex.DpexDataLoader.tuned`."""
        from dpex.autotune.runtime.tuned import Tuned

        tuner = self.tuner()
        found = self.current_settings() if tuner is None else tuner.found
        seeding = str(self._loader.seeding)
        return Tuned(local=found.local, remote=found.remote, prefetch=max(1, found.prefetch), seeding=seeding)

    def untuned_settings(self) -> Settings:
        """Return the settings of an untuned loader, from its arguments."""
        loader, workers = self._loader, self._workers
        is_remote = is_ray_connected() if loader.distribute_mode == "auto" else self.may_be_remote
        local, remote = (0, workers) if is_remote else (workers, 0)
        prefetch = workers * (loader.prefetch_factor or TORCH_PREFETCH_FACTOR)
        return Settings(local=local, remote=remote, prefetch=prefetch, is_prefetch_fixed=self.is_prefetch_given)

    def limits(self, config: AutotuneConfig, start: Settings) -> Limits:
        loader, limits = self._loader, limits_of(config)
        if loader.worker_config.memory_budget is not None:
            limits = replace(limits, batch_budget=int(loader.worker_config.memory_budget))
        if self.is_prefetch_given and loader.prefetch_factor is not None:
            limits = replace(limits, prefetch_factor=loader.prefetch_factor)
        streams = {LOCAL: start.local, REMOTE: start.remote} if self.is_iterable else {}
        return limits.fixed(**(self._pins() | streams))

    def _why_untuned(self) -> str:
        """Return the reason why a number of workers is not tuned, in sentences; "" if the tuner may change them all.

        If each worker reads a stream, the number of all workers is fixed; otherwise the number of reading workers is.
        """
        if not self.reads_streams:
            return ""
        return f"{self.why_streams()} {_NOT_TUNED if self.is_iterable else _READING_NOT_TUNED}"

    def why_streams(self) -> str:
        """Return the number of streams and its reason, in sentences; "" without an iterable dataset or workers."""
        if not self.reads_streams or not self._workers:
            return ""
        streams: Streams | None = self._loader._streams if self._loader._is_auto else None
        if streams is not None:
            return streams.why
        return describe_streams(self._workers, self.shards(), "num_workers says so")

    def shards(self) -> int:
        """Return the number of shards that an iterable dataset names for this rank; 0 for all other datasets."""
        return named_shards(self._loader.dataset, ranks(launcher_environment())) or 0 if self.reads_streams else 0

    def with_shards(self, streams: tuple[StreamStats, ...]) -> tuple[StreamStats, ...]:
        """Return the streams with their numbers of shards: stream k of n has shards k, k + n, k + 2n and so on."""
        shards, count = self.shards(), len(streams)
        return tuple(one._replace(shards=len(range(k, shards, count))) for k, one in enumerate(streams))

    @property
    def reads_streams(self) -> bool:
        """True for an iterable dataset, whether or not other workers decode it."""
        return self.is_iterable or self.is_split

    def _pins(self) -> dict[str, Any]:
        """Return the settings that the user fixed, by name. A daemonic process has no local workers."""
        return {**self._loader._pins, LOCAL: 0} if is_daemonic() else dict(self._loader._pins)

    def start_settings(self) -> Settings:
        from dpex.autotune.runtime.tuned import start_of
        from dpex.autotune.runtime.tuner import cold_start
        from dpex.engine.with_workers import lanes_of

        config = self._loader.autotune or AutotuneConfig()
        known = start_of(config)
        if known is not None:
            # the tuner would keep a number above this limit, because no measurement shows that it is too large
            begin = replace(known.settings, local=min(most_waiting(config, rank_cpus()), known.local))
            begin = begin if is_ray_connected() else replace(begin, local=begin.local or 1, remote=0)
            begin = replace(self.untuned_settings(), prefetch=known.prefetch) if self.is_iterable else begin
            return replace(begin, **self._pins())
        start = cold_start() if self._loader._is_auto and not self.is_iterable else self.untuned_settings()
        lanes = 1 if self.is_prefetch_given else lanes_of(self._loader)
        return replace(start, **{"prefetch": lanes * start.prefetch, **self._pins()})

    # -- resizing ------------------------------------------------------------------------------------------------------

    def resize(self, local: int | None, remote: int | None, prefetch: int | None) -> None:
        """See `dpex.DpexDataLoader.resize`."""
        loader, now = self._loader, self.current_settings()
        fixed = self.fixed_by_resize(now, local, remote, prefetch)
        settings = self.resized(now, fixed)
        tuner = self.tuner()
        if tuner is not None:
            loader._pins = {**loader._pins, **fixed}  # `copy.copy` of a loader has the same dict
            tuner.pin(loader._pins)
            settings = tuner.settings
        else:
            loader._settings = settings
        for iterator in list(loader._runtime.iterators):
            iterator._engine.resize(settings)

    def fixed_by_resize(
        self, now: Settings, local: int | None, remote: int | None, prefetch: int | None
    ) -> dict[str, int]:
        """Return the settings that a call of ``resize`` fixes, by name.

        Raises:
            OptionError: A count is invalid, the loader has no workers, or ``local`` or ``remote`` cannot change.
        """
        check_count("local", local)
        check_count("remote", remote)
        check_count("prefetch", prefetch, least=1)
        if self._workers == 0:
            raise OptionError(
                "resize() of a loader with num_workers=0, which makes its batches in the training process: make a new "
                "loader with at least one worker, or with num_workers='auto'"
            )
        if self.is_piped:
            raise OptionError(
                "resize() of a loader of a DataPipe, whose batches PyTorch's own workers make: make a new loader with "
                "that number of workers"
            )
        counts = zip(KNOBS, (local, remote, prefetch), strict=True)
        fixed = {knob: count for knob, count in counts if count is not None}
        if self.are_workers_fixed and any(
            fixed.get(name, getattr(now, name)) != getattr(now, name) for name in WORKER_POOLS
        ):
            self._refuse_other_workers(now, {name: fixed[name] for name in WORKER_POOLS if name in fixed})
        return fixed

    def resized(self, now: Settings, fixed: Mapping[str, int]) -> Settings:
        """Return the present settings ``now``, changed by the ``fixed`` ones.

        Raises:
            OptionError: Local workers are PyTorch's, or no worker would be left.
            ClusterError: ``fixed`` asks for remote workers, and Ray is not installed.
        """
        is_prefetch_fixed = now.is_prefetch_fixed or "prefetch" in fixed
        settings = replace(now, **fixed, is_prefetch_fixed=is_prefetch_fixed)
        if not settings.workers:
            raise OptionError(
                "resize() to 0 local and 0 remote workers: give at least one. To make batches in the training process, "
                "make a loader with num_workers=0"
            )
        if settings.remote > now.remote:
            require_ray()
        why = self.why_torch
        if why is not None and settings.local:
            raise OptionError(
                f"resize() to {settings.local} local and {settings.remote} remote workers: local workers are PyTorch's "
                f"({why}), whose number and prefetch cannot change after the loader is made. Make a new loader, or "
                "give remote workers only"
            )
        return settings

    def _refuse_other_workers(self, now: Settings, asked: Mapping[str, int]) -> None:
        why = "seeding='worker' ties the random state to the workers"
        remedy = "With seeding='batch' any number gives the same batches"
        if self.is_iterable:
            why = "the number of workers determines the samples of each worker of an iterable dataset"
            remedy = "Make a new loader for another number"
        raise OptionError(
            f"resize({', '.join(f'{name}={count}' for name, count in asked.items())}) asks for other workers than the "
            f"{now.local} local and {now.remote} remote, but {why}. {remedy}"
        )


def check_count(name: str, value: int | None, least: int = 0) -> None:
    """Raise OptionError unless ``value`` is an int of at least ``least``, or None."""
    is_count = isinstance(value, int) and not isinstance(value, bool) and value >= least
    if value is not None and not is_count:
        raise OptionError(f"{name}={value!r}: give a whole number of at least {least}, or None to leave it as it is")


def fix_workers(loader: BaseLoader[Any], count: Any) -> None:
    """End tuning before ``loader.num_workers`` is assigned. The new number applies from the next ``iter()`` on.

    Raises:
        OptionError: ``count`` is a string or negative. ``iter()`` refuses other invalid values, as in torch.
    """
    if isinstance(count, str) or (isinstance(count, SupportsIndex) and index(count) < 0):
        raise OptionError(
            f"loader.num_workers = {count!r}: assign a whole number of at least 0; to have it tuned, make the loader "
            "with num_workers='auto'"
        )
    sizing = Sizing(loader)
    if sizing.is_tuned:
        limit = f"max_streams={count}" if sizing.is_iterable or sizing.is_split else f"max_local={count}"
        instead = f"num_workers='auto', autotune=AutotuneConfig({limit})"
        warn(
            f"num_workers={count} was assigned to a loader that is tuned. It has that many workers from the next "
            "iter() on, and nothing is tuned any more"
            + (f". To limit the tuning instead, make the loader with {instead}" if count else ""),
            UserWarning,
        )
        loader._iterator = None  # that of persistent workers, which would keep their number
    loader._is_auto = False
    if isinstance(loader.autotune, AutotuneConfig):
        loader.autotune = False
    loader._settings, loader._pins = None, {}
    loader._runtime.dismiss_tuner()


def is_split(loader: BaseLoader[Any]) -> bool:
    """Return True if some workers read the loader's streams and others decode. It needs ``seeding="batch"``."""
    may_be_split = (
        loader._dataset_kind == DatasetKind.Iterable
        and loader.seeding == "batch"
        and loader.num_workers > 0
        and sys.platform == "linux"
        and not is_daemonic()
    )
    if not may_be_split:
        return False
    from dpex.worker.decoded_stream import DecodedStream

    return isinstance(loader.dataset, DecodedStream)


def is_daemonic() -> bool:
    """Return True if this process may not have children by `multiprocessing`, like a process of a `Pool` or a worker of
    torch."""
    return multiprocessing.current_process().daemon


def stay_in_process_if_daemonic(loader: BaseLoader[Any]) -> None:
    """Set ``num_workers`` to 0 if it was "auto", this process may not have children, and Ray is not used."""
    if loader._is_auto and loader.num_workers and loader.distribute_mode is False and is_daemonic():
        logger.info("this process is daemonic and may not have children: num_workers='auto' stays in it")
        vars(loader)["num_workers"] = loader.timeout = 0
