"""How many workers a loader has, where they are, and its prefetch: as its arguments say, as `resize` says, or tuned.

`SizeOptions` is what the arguments say. It is made anew whenever it is asked for, as frameworks set attributes of a
loader, and what it concludes depends on nothing else but the system and the environment.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch.utils.data import IterableDataset, IterDataPipe, MapDataPipe
from torch.utils.data.graph import traverse_dps

from dpex._torch import DatasetKind
from dpex.autotune.config import AutotuneConfig
from dpex.errors import FixedWorkersError, OptionError
from dpex.options import LoaderOptions, Seeding, check_count
from dpex.schedule.names import KNOBS, LOCAL, REMOTE
from dpex.schedule.prefetch import Sizes
from dpex.schedule.probing import attribute
from dpex.schedule.streams import Streams, choose, plural
from dpex.system.cpus import rank_cpus, static_worker_count
from dpex.system.ray_package import is_ray_connected

if TYPE_CHECKING:
    from dpex.autotune.runtime.allowed import Limits
    from dpex.autotune.runtime.tuner import Tuner
    from dpex.autotune.types import Settings
    from dpex.loader.rebuilt import Source

logger = logging.getLogger("dpex")
TORCH_PREFETCH_FACTOR = 2
"""What torch fills in; frameworks hand it back when they rebuild a loader, so it counts as not given."""


@dataclass(frozen=True, kw_only=True)
class SizeOptions:
    """See the module, and `dpex.DpexDataLoader` for what is named as there.

    is_iterable: each worker reads a stream of the dataset. is_split: workers read its streams, and others decode.
    is_piped: it is a DataPipe. may_be_remote: workers may be on the cluster; is_remote: a fixed number of them is.
    streams: where dpex chose their number. pins: what `resize` fixed, by name.
    """

    num_workers: int
    is_auto: bool
    prefetch_factor: int | None
    is_prefetch_given: bool
    seeding: Seeding
    is_iterable: bool
    is_split: bool
    is_piped: bool
    may_be_remote: bool
    is_remote: bool
    local_engine: Literal["dpex", "torch"]
    autotune: AutotuneConfig | Literal[False] | None
    streams: Streams | None
    memory_budget: int | None
    pins: Mapping[str, int]

    @property
    def why_torch(self) -> str | None:
        """Why PyTorch's own iterators do the local work, if they do."""
        if self.local_engine == "torch":
            return "local_engine='torch'"
        return f"dpex's own workers need Linux, and this is {sys.platform}" if sys.platform != "linux" else None

    @property
    def is_tuned(self) -> bool:
        """Return True if a tuner changes the sizes."""
        if self.autotune is False or (self.autotune is None and not self.is_auto):
            return False
        if not self.may_be_remote and is_daemonic():
            return False
        if self.num_workers == 0 or self.seeding == "worker" or self.is_piped:
            return False
        return self.why_torch is None

    @property
    def are_workers_fixed(self) -> bool:
        """Return True if what is read, or the random numbers, depend on which worker makes a batch."""
        return self.seeding == "worker" or self.is_iterable

    def fixed(self) -> Sizes:
        """The sizes of a loader that is not tuned."""
        workers = self.num_workers
        prefetch = workers * (self.prefetch_factor or 0) if self.is_prefetch_given else None
        return Sizes(
            local=0 if self.is_remote else workers, remote=workers if self.is_remote else 0, prefetch=prefetch or None
        )

    def limits(self) -> Limits:
        """What tuning may not go beyond, whatever its configuration allows."""
        from dpex.autotune.runtime.allowed import Limits

        return Limits(
            streams=self._why_streams(),
            reading=self._why_reading(),
            memory_budget=self.memory_budget,
            prefetch_factor=self.prefetch_factor if self.is_prefetch_given else None,
            pins={**self.pins, LOCAL: 0} if is_daemonic() else self.pins,
        )

    def _why_streams(self) -> str:
        """Why the number of workers stays as it is, where each reads a stream; "" where it is tuned."""
        if not self.is_iterable:
            return ""
        if self.streams is not None and self.is_auto:
            return self.streams.why
        return (
            f"The dataset is read in {self.num_workers} streams, as num_workers says. The number decides what each "
            "worker reads, so it stays the same; only the prefetch is tuned."
        )

    def _why_reading(self) -> str:
        """How many workers read for those that decode, and why so many; "" where nobody does."""
        if not self.is_split:
            return ""
        number = f"The dataset is read in {plural(self.num_workers, 'stream')}, as num_workers says."
        if self.streams is not None and self.is_auto:
            number = self.streams.number
        return (
            f"{number} That number decides what is read, so it is not tuned. What is read is decoded by other workers, "
            "whose number is tuned."
        )

    def start(self, limits: Limits) -> Settings:
        """Where tuning begins."""
        from dpex.autotune.runtime.allowed import cold_start
        from dpex.autotune.types import Settings

        if self.is_auto and not limits.streams:
            start = cold_start()
        else:
            sizes = self.fixed()
            prefetch = max(1, self.num_workers * (self.prefetch_factor or TORCH_PREFETCH_FACTOR))
            start = Settings(local=sizes.local, remote=sizes.remote, prefetch=prefetch)
        pins = limits.pins or {}
        local, remote = pins.get(LOCAL, start.local), pins.get(REMOTE, start.remote)
        return Settings(local=local, remote=remote, prefetch=pins.get("prefetch", start.prefetch))

    def fixed_by_resize(
        self, now: Sizes, local: int | None, remote: int | None, prefetch: int | None
    ) -> dict[str, int]:
        """What a call of ``resize`` fixes, by name: what it names, and where the total is fixed the rest of that, too.

        Raises:
            OptionError: A count makes no sense.
            FixedWorkersError: It asks for another number of workers, and that cannot change.
        """
        check_count("local", local)
        check_count("remote", remote)
        check_count("prefetch", prefetch, least=1)
        if self.num_workers == 0:
            raise FixedWorkersError(
                "resize() of a loader with num_workers=0, which makes its batches in the training process: make a new "
                "loader with at least one worker, or with num_workers='auto'"
            )
        if self.are_workers_fixed:
            local, remote = self._split_of_fixed(now, local, remote)
        counts = zip(KNOBS, (local, remote, prefetch), strict=True)
        return {knob: count for knob, count in counts if count is not None}

    def resized(self, now: Sizes, fixed: Mapping[str, int]) -> Sizes:
        """The sizes of now with those that are fixed by name.

        Raises:
            FixedWorkersError: Nobody could carry that out.
            OptionError: No worker would be left.
        """
        sizes = Sizes(
            local=fixed.get(LOCAL, now.local),
            remote=fixed.get(REMOTE, now.remote),
            prefetch=fixed.get("prefetch", now.prefetch),
        )
        if sizes.local + sizes.remote == 0:
            raise OptionError(
                "resize() to 0 local and 0 remote workers: give at least one; a loader that makes its batches in the "
                "training process is one with num_workers=0"
            )
        why = self.why_torch
        if why is not None and (sizes.remote == 0 or (sizes.local and sys.platform != "linux")):
            raise FixedWorkersError(
                f"resize() to {sizes.local} local and {sizes.remote} remote workers: local workers are PyTorch's "
                f"({why}), whose number and prefetch stay what the loader was made with. Make a new loader, or "
                "give remote workers only"
            )
        return sizes

    def _split_of_fixed(self, now: Sizes, local: int | None, remote: int | None) -> tuple[int, int]:
        total = self.num_workers
        if local is None and remote is None:
            return now.local, now.remote
        if local is None:
            local = total - (remote or 0)
        if remote is None:
            remote = total - local
        if local + remote != total or min(local, remote) < 0:
            raise FixedWorkersError(
                f"resize(local={local}, remote={remote}) asks for {local + remote} workers, but seeding="
                f"{self.seeding!r} ties the random state to num_workers={total} logical workers. The next iterator may "
                'have them elsewhere, but not another number of them. With seeding="batch" any number gives the same '
                "batches"
            )
        return local, remote


def is_split(loader: Any) -> bool:
    """Whether some workers read the loader's streams and others decode: under ``seeding="batch"`` it does not matter
    who decodes."""
    may_be_split = (
        loader._dataset_kind == DatasetKind.Iterable
        and loader.seeding == "batch"
        and loader.num_workers > 0
        and loader.worker_config.local_engine == "dpex"
        and sys.platform == "linux"
        and not is_daemonic()
    )
    if not may_be_split:
        return False
    from dpex.worker.decoded_stream import DecodedStream

    return isinstance(loader.dataset, DecodedStream)


def size_options(loader: Any) -> SizeOptions:
    """What a loader's arguments say now."""
    is_remote = is_ray_connected() if loader.distribute_mode == "auto" else bool(loader.distribute_mode)
    splits = is_split(loader)
    return SizeOptions(
        num_workers=int(loader.num_workers),
        is_auto=loader._is_auto,
        prefetch_factor=loader.prefetch_factor,
        is_prefetch_given=loader._prefetch_is_given,
        seeding=loader.seeding,
        is_iterable=loader._dataset_kind == DatasetKind.Iterable and not splits,
        is_split=splits,
        is_piped=isinstance(loader.dataset, (IterDataPipe, MapDataPipe)),
        may_be_remote=loader.distribute_mode is not False,
        is_remote=is_remote,
        local_engine=loader.worker_config.local_engine,
        autotune=loader.autotune,
        streams=loader._streams,
        memory_budget=loader.worker_config.memory_budget,
        pins=loader._pins,
    )


def new_tuner(options: SizeOptions, ray_remote_args: Mapping[str, Any] | None) -> Tuner:
    """The tuner of a loader with these options."""
    from dpex.autotune.runtime.tuner import ROOM_EVERY_S, Tuner

    room = None
    config = options.autotune or AutotuneConfig()
    if options.may_be_remote:
        from dpex.pools.ray.room import RemoteRoom

        room = RemoteRoom(ray_remote_args, weight=config.cluster_weight, every_s=ROOM_EVERY_S)
    limits = options.limits()
    return Tuner(config, options.start(limits), limits, room=room)


def is_daemonic() -> bool:
    """Whether this process may not have children by `multiprocessing`: of a `Pool`, or a worker of torch's."""
    return multiprocessing.current_process().daemon


def stay_in_process_if_daemonic(loader: Any) -> None:
    """Under "auto", in a process that may not have children, batches are made in it, as with ``num_workers=0``."""
    if loader._is_auto and loader.num_workers and loader.distribute_mode is False and is_daemonic():
        logger.info("this process is daemonic and may not have children: num_workers='auto' stays in it")
        vars(loader)["num_workers"] = loader.timeout = 0


def worker_count(num_workers: int | str) -> int:
    """Return the number of workers to begin with; ``"auto"`` is one that this machine can have.

    ``num_workers`` has passed `dpex.options.check_torchs`.
    """
    return static_worker_count() if isinstance(num_workers, str) else num_workers


def streams_of(options: LoaderOptions, dataset: Any, made_from: Source | None) -> Streams | None:
    """How many streams an iterable dataset is read in, where that is left to dpex; None of any other dataset.

    A loader that was made from another keeps that one's number: what is around the dataset now may name no shards.
    """
    if not isinstance(dataset, IterableDataset):
        return None
    if made_from is not None and made_from.streams is not None:
        return made_from.streams
    autotune = options.autotune
    most = autotune.max_streams if isinstance(autotune, AutotuneConfig) else None
    if isinstance(dataset, IterDataPipe):
        is_split, why_one = is_sharded(dataset), "the DataPipe has no sharding_filter"
    else:
        is_split, why_one = False, _why_torch(options)
    return choose(dataset, rank_cpus(), most, _launched(), is_split=is_split, why_one=why_one)


def is_sharded(pipe: Any) -> bool:
    """Whether all that a DataPipe reads goes through a ``sharding_filter``, by which torch's workers divide it."""
    try:
        return _is_graph_sharded(traverse_dps(pipe))
    except Exception as error:  # it looks into objects of the user, which may raise anything
        logger.info("auto: the stages of the DataPipe could not be read (%r)", error)
        return False


def _is_graph_sharded(graph: Mapping[int, Any]) -> bool:
    return bool(graph) and all(
        attribute(pipe, "apply_sharding") is not None or _is_graph_sharded(sources) for pipe, sources in graph.values()
    )


def _why_torch(options: LoaderOptions) -> str:
    """Why PyTorch's workers read the dataset, who all begin at once, where they do."""
    if options.distribute_mode is True or (options.worker_config.local_engine == "dpex" and sys.platform == "linux"):
        return ""
    return "it names no shards, and PyTorch's own workers would read it"


def _launched() -> Mapping[str, str]:
    """What the launcher says in the environment; the number of ranks is torch.distributed's where that knows it."""
    import torch.distributed as dist

    if not dist.is_available() or not dist.is_initialized():
        return os.environ
    return {**os.environ, "WORLD_SIZE": str(dist.get_world_size())}
