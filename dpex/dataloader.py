"""`DpexDataLoader`: torch's DataLoader whose workers may be anywhere and change while training runs."""

from __future__ import annotations

import inspect
import logging
import multiprocessing
import os
import sys
import weakref
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, MapDataPipe, get_worker_info
from torch.utils.data.dataloader import _BaseDataLoaderIter, _DatasetKind

from dpex.autotune.config import AutotuneConfig
from dpex.autotune.runtime.recorder import check as check_trace
from dpex.autotune.runtime.recorder import rank
from dpex.autotune.runtime.tuner import ROOM_EVERY_S, Limits, Tuner, cold_start
from dpex.autotune.types import Decision, Settings
from dpex.core.names import encodable
from dpex.core.prefetch import Sizes
from dpex.core.streams import Streams, choose
from dpex.diagnose import at_exit
from dpex.diagnose.counters import Book, Context
from dpex.diagnose.source import Case
from dpex.errors import FixedWorkersError, OptionError
from dpex.iterators import (
    ArenaCache,
    _DpexDataLoaderIter,
    _DpexInlineDataLoaderIter,
    _DpexMapDataLoaderIter,
    _DpexMeteredUnmarkedDataLoaderIter,
    _DpexUnmarkedDataLoaderIter,
    _MeteredInlineDataLoaderIter,
    draws_ahead_safely,
)
from dpex.options import Options, Seeding, check_count, resolve_seeding
from dpex.pools.factory import LaneMaker, RemoteRoom
from dpex.pools.local.packing import Packing
from dpex.profile.live_timer import SWITCH, TicketTimer, is_switched_on
from dpex.stats import LastStats, LoaderStats
from dpex.system.cpus import rank_cpus, static_worker_count
from dpex.worker.threads import declares_thread_safe
from dpex.worker.torch_workers import SeededInProcessIter, SeededWorkersIter

if TYPE_CHECKING:
    from dpex.diagnose.diagnosis import Diagnosis
    from dpex.telemetry.loader_metrics import Ledger
    from dpex.telemetry.registration import Membership

logger = logging.getLogger("dpex")
_TORCH_HAS_IN_ORDER = "in_order" in inspect.signature(DataLoader.__init__).parameters
"""torch 2.6 and later; before, dpex brings it along."""
TORCH_PREFETCH_FACTOR = 2
"""What torch fills in; frameworks hand it back when they rebuild a loader, so it counts as not given."""
T_co = TypeVar("T_co", covariant=True)
_Counting = TypeVar("_Counting", _DpexDataLoaderIter, _DpexInlineDataLoaderIter)


class DpexDataLoader(DataLoader[T_co]):
    """A drop-in `torch.utils.data.DataLoader` with local and remote workers that can be resized live.

    All of torch's arguments, in torch's order and with torch's meaning, and these keyword-only ones, each kept as an
    attribute of its own name:

    Args:
        num_workers: as in torch, or ``"auto"``: as many as pay, here and on the cluster, while training runs.
        distribute_mode: False: workers on this machine. True: on the Ray cluster. ``"auto"``: on the cluster if this
            process is connected to one.
        head_address: of the Ray cluster: ``"auto"``, ``"local"`` (a private one in this machine) or ``"host:port"``.
            A Ray that is already initialised is used as it is.
        seeding: ``"worker"``: random states as torch has them, one per logical worker. ``"batch"``: a function of
            (base seed, epoch, batch index) alone, so that the number and place of workers do not matter. None: "worker"
            for a fixed ``num_workers``, "batch" for ``"auto"``.
        memory_budget: bytes of batches in flight at most: those that are made and not yet delivered, and, reckoned as
            large as the largest so far, those that workers hold. It can be exceeded only by the latter, when they turn
            out larger than all before: by two batches for each local worker and four for each remote one, until they
            are delivered; and by a single batch that is larger than the budget. Tiny batches do not travel many to a
            message then, which is slower. None: no limit but the prefetch depth.
        worker_resources: options of each Ray actor, such as ``{"num_cpus": 2, "resources": {"cpu_node": 1}}``.
        runtime_env: Ray's ``runtime_env`` for the actors.
        local_engine: ``"dpex"``, or ``"torch"``: torch's own iterators do the local work (always so where dpex's local
            lane cannot serve, as on other systems than Linux). `seeding` holds; nothing is tuned or resized then.
        autotune: None: ``num_workers="auto"`` is tuned with the defaults, and a number is kept. An `AutotuneConfig`:
            tuned within its limits, starting from ``num_workers`` (needs ``seeding="batch"``, which is the default
            then). False: nothing is tuned; ``"auto"`` is a number chosen once. The number of workers of an iterable
            dataset decides what each of them reads, so it is never tuned, only the prefetch is: ``"auto"`` is one for
            each CPU of this rank, at most the dataset's ``num_shards`` or ``n_shards``, or what
            ``AutotuneConfig(max_streams=...)`` says.
        thread_safe: True: several threads may call the dataset and ``collate_fn`` at once. Local workers beyond one per
            CPU are then threads of the others instead of processes, at a fraction of the memory; the batches are the
            same. ``worker_init_fn`` is called once per process, and ``get_worker_info()`` is right in each thread.
            Needs ``seeding="batch"`` (the default then) and a map-style dataset that draws from generators of its own,
            see `dpex.ticket_seed`; one that moves a global generator is noticed, warned of, and given processes. None:
            whether the dataset has ``dpex_thread_safe = True``.
        auto_workers: whether ``num_workers`` was given as ``"auto"``. For frameworks, which build a loader anew from
            the attributes of another, where ``num_workers`` is a number; leave it out.
        name: of this loader in its metrics; None: "loader-1", "loader-2" and so on.
        metrics_port: serve metrics for Prometheus on this port from the first ``iter()`` until the loader is closed or
            dies; 0, or where another process has that port: on one that is free. The loaders of a process share one
            endpoint. None: ``$DPEX_METRICS_PORT``, or no metrics.
        metrics_host: the address to serve on; by default only this machine can reach it.
        metrics_dir: where Prometheus looks for processes (``file_sd``); None: ``$DPEX_METRICS_DIR``, else ``dpex`` in
            ``$XDG_RUNTIME_DIR``, else ``dpex-<uid>`` in the directory for temporary files, made for this user alone.
        metrics_certfile, metrics_keyfile: PEM files, to serve by TLS.
        metrics_client_cafile: PEM file; only clients with a certificate of that authority are served.

    Raises:
        ValueError, TypeError: as torch does, and `OptionError` (a ValueError) for dpex's own options.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Any = None,
        batch_sampler: Any = None,
        num_workers: int | Literal["auto"] = 0,
        collate_fn: Callable[[Any], Any] | None = None,
        pin_memory: bool = False,
        drop_last: bool = False,
        timeout: float = 0,
        worker_init_fn: Callable[[int], None] | None = None,
        multiprocessing_context: Any = None,
        generator: torch.Generator | None = None,
        *,
        prefetch_factor: int | None = None,
        persistent_workers: bool = False,
        pin_memory_device: str = "",
        in_order: bool = True,
        distribute_mode: bool | Literal["auto"] = False,
        head_address: str = "auto",
        seeding: Seeding | None = None,
        memory_budget: int | None = None,
        worker_resources: Mapping[str, Any] | None = None,
        runtime_env: Mapping[str, Any] | None = None,
        local_engine: Literal["dpex", "torch"] = "dpex",
        autotune: AutotuneConfig | Literal[False] | None = None,
        thread_safe: bool | None = None,
        auto_workers: bool | None = None,
        name: str | None = None,
        metrics_port: int | None = None,
        metrics_host: str = "127.0.0.1",
        metrics_dir: str | None = None,
        metrics_certfile: str | None = None,
        metrics_keyfile: str | None = None,
        metrics_client_cafile: str | None = None,
    ) -> None:
        auto = num_workers == "auto" or bool(auto_workers)
        streams = _streams(dataset, autotune) if auto else None
        workers = _worker_count(num_workers) if streams is None else streams.count
        options = Options(
            distribute_mode=distribute_mode,
            head_address=head_address,
            seeding=resolve_seeding(seeding, auto or isinstance(autotune, AutotuneConfig) or bool(thread_safe)),
            memory_budget=memory_budget,
            worker_resources=worker_resources,
            runtime_env=runtime_env,
            local_engine=local_engine,
            autotune=autotune,
            thread_safe=thread_safe,
            name=name,
            metrics_port=metrics_port,
            metrics_host=metrics_host,
            metrics_dir=metrics_dir,
            metrics_certfile=metrics_certfile,
            metrics_keyfile=metrics_keyfile,
            metrics_client_cafile=metrics_client_cafile,
        )
        self.distribute_mode = options.distribute_mode
        self.head_address = options.head_address
        self.seeding: Seeding = options.seeding
        self.memory_budget = options.memory_budget
        self.worker_resources = options.worker_resources
        self.runtime_env = options.runtime_env
        self.local_engine = options.local_engine
        self.autotune = options.autotune
        self.thread_safe = options.thread_safe
        self.name = options.name
        self.metrics_port = options.metrics_port
        self.metrics_host = options.metrics_host
        self.metrics_dir = options.metrics_dir
        self.metrics_certfile = options.metrics_certfile
        self.metrics_keyfile = options.metrics_keyfile
        self.metrics_client_cafile = options.metrics_client_cafile
        self._streams = streams
        self._chosen = workers if auto else None
        self._prefetch_is_given = prefetch_factor not in (None, TORCH_PREFETCH_FACTOR)
        self._sizes: Sizes | None = None
        self._pins: dict[str, int] = {}
        self._new_runtime()
        super().__init__(
            dataset,
            batch_size,
            shuffle,
            sampler,
            batch_sampler,
            workers,
            collate_fn,
            pin_memory,
            drop_last,
            timeout,
            worker_init_fn,
            multiprocessing_context,
            generator,
            prefetch_factor=prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if _TORCH_HAS_IN_ORDER else {}),
        )
        self.in_order = in_order
        self.auto_workers = auto
        if thread_safe and self._dataset_kind == _DatasetKind.Iterable:
            raise OptionError(
                "thread_safe=True: workers of an IterableDataset each have a stream, and a process, of their own; "
                "leave it out, or use a map-style dataset"
            )
        if self._is_tuned():
            check_trace(self.autotune or AutotuneConfig(), os.environ)
        if self.num_workers and self.local_engine == "dpex" and self.distribute_mode is not True and _ray_is_up():
            from dpex.pools.local.clean_fork_server import start_early

            start_early(self.multiprocessing_context)

    # -- life ----------------------------------------------------------------------------------------------------

    def _new_runtime(self) -> None:
        self._iterators: weakref.WeakSet[_DpexDataLoaderIter] = weakref.WeakSet()
        self._arenas = ArenaCache()
        self._share: weakref.finalize | None = None  # type: ignore[type-arg]
        self._last_stats = LastStats()
        self._tuner: Tuner | None = None
        self._packing: Packing | None = None
        self._membership: Membership | None = None
        self._book = Book()
        self._timer = TicketTimer(is_on=is_switched_on(os.environ))
        self._is_asked = False

    def __setattr__(self, attr: str, val: Any) -> None:
        super().__setattr__(attr, val)
        if attr == "num_workers":  # whoever sets a number later means it
            self.auto_workers = False

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__.copy()
        runtime = (
            "_iterators",
            "_arenas",
            "_share",
            "_last_stats",
            "_tuner",
            "_packing",
            "_membership",
            "_book",
            "_timer",
        )
        for name in runtime:
            state.pop(name, None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._new_runtime()

    def _get_iterator(self) -> _BaseDataLoaderIter:
        piped = isinstance(self.dataset, (IterDataPipe, MapDataPipe))
        if self.auto_workers and self.num_workers and self.distribute_mode is False and _is_daemonic():
            self._stay_in_process()
        tuner = self._tuning()
        sizes = self._current_sizes()
        if piped:
            return super()._get_iterator()
        if sizes.remote == 0 and tuner is None and self._why_torch() is not None:
            return self._torchs_iterator()
        if (
            tuner is None
            and self.num_workers == 0
            and (self.seeding == "worker" or self._dataset_kind == _DatasetKind.Iterable)
        ):
            return self._inline_iterator()
        self.check_worker_number_rationality()
        on_cluster = sizes.remote > 0 or (tuner is not None and self._is_distributed())
        if on_cluster:
            self._hold_cluster()
        ledger = self._ledger(on_cluster=on_cluster)
        kind = _DpexDataLoaderIter if self._dataset_kind == _DatasetKind.Iterable else _DpexMapDataLoaderIter
        self._watch_for_end()
        iterator = kind(self, self._lane_maker(), sizes, tuner, ledger, self._book)
        self._iterators.add(iterator)
        return self._latest(iterator)

    def _inline_iterator(self) -> _BaseDataLoaderIter:
        ledger = self._ledger(on_cluster=False)
        may_warn = self._dataset_kind == _DatasetKind.Iterable and self._IterableDataset_len_called is not None
        if ledger is None and not (self._is_asked or at_exit.is_wanted(os.environ)):
            plain = _DpexInlineDataLoaderIter if may_warn else _DpexUnmarkedDataLoaderIter
            return self._latest(plain(self, self._arenas))
        self._watch_for_end()
        metered = _MeteredInlineDataLoaderIter if may_warn else _DpexMeteredUnmarkedDataLoaderIter
        return self._latest(metered(self, self._arenas, ledger, self._book))

    def _latest(self, iterator: _Counting) -> _Counting:
        """Have `stats` speak of this iterator from now on."""
        self._last_stats = iterator.last_stats
        return iterator

    def _stay_in_process(self) -> None:
        """ "auto" in a process that may not have children: batches are made in it, as with ``num_workers=0``."""
        logger.info("this process is daemonic and may not have children: num_workers='auto' stays in it")
        vars(self)["num_workers"] = self.timeout = 0

    def _watch_for_end(self) -> None:
        if get_worker_info() is None:
            at_exit.watch(self._book, self._case().diagnose, os.environ)

    def _ledger(self, *, on_cluster: bool) -> Ledger | None:
        """Where this loader's counts go, if they are exported: by the endpoint, or, on a cluster, in Ray's metrics."""
        asked = self.metrics_port is not None or "DPEX_METRICS_PORT" in os.environ
        if not (asked or on_cluster) or get_worker_info() is not None:
            return None
        if self._membership is None:
            self._membership = self._enrol(in_ray=on_cluster or _ray_is_up())
        if self._membership is None:
            return None
        ledger = self._membership.ledger
        ledger.tuner, ledger.case = self._tuner, self._case()
        return ledger

    def _enrol(self, *, in_ray: bool) -> Membership | None:
        from dpex.telemetry.exporter import Endpoint
        from dpex.telemetry.registration import enrol

        endpoint = None
        if self.metrics_port is not None:
            endpoint = Endpoint(
                port=self.metrics_port,
                host=self.metrics_host,
                directory=self.metrics_dir,
                certfile=self.metrics_certfile,
                keyfile=self.metrics_keyfile,
                client_cafile=self.metrics_client_cafile,
            )
        info = (type(self.dataset).__name__, str(self.batch_size), self.seeding)
        return enrol(self, endpoint, self.name, info, in_ray=in_ray)

    def _why_torch(self) -> str | None:
        """Why PyTorch's own iterators do the local work, if they do."""
        if self.local_engine == "torch":
            return "local_engine='torch'"
        return f"dpex's own workers need Linux, and this is {sys.platform}" if sys.platform != "linux" else None

    def _torchs_iterator(self) -> _BaseDataLoaderIter:
        logger.info("PyTorch's own iterators make the batches: %s", self._why_torch())
        if self.seeding == "worker" or self._dataset_kind == _DatasetKind.Iterable:
            return super()._get_iterator()
        if self.num_workers == 0:
            return SeededInProcessIter(self)
        self.check_worker_number_rationality()
        return SeededWorkersIter(self)

    def _lane_maker(self) -> LaneMaker:
        return LaneMaker(
            multiprocessing_context=self.multiprocessing_context,
            head_address=self.head_address,
            worker_resources=self.worker_resources,
            runtime_env=self.runtime_env,
            packing=self._how_to_pack(),
            counts_from_zero=self._dataset_kind == _DatasetKind.Map and draws_ahead_safely(self._index_sampler),
        )

    def _how_to_pack(self) -> Packing:
        """Kept for the loader's life: it knows whether this dataset was found to draw from global generators."""
        if self._packing is None:
            self._packing = Packing(rank_cpus() if self._may_use_threads() else None)
        return self._packing

    def _may_use_threads(self) -> bool:
        if self.seeding != "batch" or self._dataset_kind == _DatasetKind.Iterable:
            return False
        return declares_thread_safe(self.dataset) if self.thread_safe is None else self.thread_safe

    def _hold_cluster(self) -> None:
        """Keep a share of the connection to Ray, so that actors wait between epochs instead of starting anew."""
        from dpex.pools.ray.cluster import connect, release

        if self._share is None or not self._share.alive:
            self._share = weakref.finalize(self, release, connect(self.head_address))

    def close(self) -> None:
        """End all workers of all iterators of this loader; the loader itself can be iterated anew. Idempotent.

        Actors go, and so does a private Ray that dpex started, unless another loader uses them.
        """
        for iterator in list(self._iterators):
            iterator._shutdown_workers()
        self._iterator = None
        at_exit.report(self._book)
        membership, self._membership = self._membership, None
        if membership is not None:
            membership.end()
        share = self._share.detach() if self._share is not None else None
        if share is not None:
            _, give_back, arguments, _ = share
            give_back(*arguments, shut_down=True)

    def __enter__(self) -> DpexDataLoader[T_co]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_worker_number_rationality(self) -> None:
        """torch's warning of more workers than CPUs: about the user's number, not about one that dpex chose."""
        if self.num_workers != self._chosen:
            super().check_worker_number_rationality()

    # -- size ----------------------------------------------------------------------------------------------------

    def _tuning(self) -> Tuner | None:
        """The tuner of this loader, if it is tuned."""
        if self._tuner is None and self._is_tuned():
            self._tuner = self._new_tuner()
        return self._tuner

    def _is_tuned(self) -> bool:
        if self.autotune is False or (self.autotune is None and not self.auto_workers):
            return False
        if self.distribute_mode is False and _is_daemonic():
            return False
        if self.seeding == "worker" or isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return False
        if self._dataset_kind == _DatasetKind.Iterable and self.num_workers == 0:
            return False
        return sys.platform == "linux" and self.local_engine == "dpex"

    def _new_tuner(self) -> Tuner:
        limits = Limits(
            streams=self._why_streams(),
            may_inline=self.worker_init_fn is None and self.timeout == 0,
            memory_budget=self.memory_budget,
            prefetch_factor=self.prefetch_factor if self._prefetch_is_given else None,
            pins={**self._pins, "local": 0} if _is_daemonic() else self._pins,
        )
        room = None
        if self.distribute_mode is not False:
            world_size = os.environ.get("WORLD_SIZE", "1")
            ranks = int(world_size) if world_size.isdigit() else 1
            room = RemoteRoom(self.worker_resources, world_size=ranks, every_s=ROOM_EVERY_S)
        return Tuner(self.autotune or AutotuneConfig(), self._first_settings(limits), limits, room=room)

    def _why_streams(self) -> str:
        """Why the number of workers stays as it is, where each reads a stream; "" where it is tuned."""
        if self._dataset_kind != _DatasetKind.Iterable:
            return ""
        if self._streams is not None and self.auto_workers:
            return self._streams.why
        return (
            f"The dataset is read in {int(self.num_workers)} streams, as num_workers says. The number decides what "
            "each worker reads, so it stays the same; only the prefetch is tuned."
        )

    def _first_settings(self, limits: Limits) -> Settings:
        if self.auto_workers and not limits.streams:
            start = cold_start()
        else:
            sizes = self._static_sizes()
            depth = max(1, self.num_workers * (self.prefetch_factor or 2))
            start = Settings(local=sizes.local, remote=sizes.remote, depth=depth)
        pins = limits.pins or {}
        local, remote = pins.get("local", start.local), pins.get("remote", start.remote)
        return Settings(local=local, remote=remote, depth=pins.get("prefetch", start.depth))

    @property
    def decisions(self) -> list[Decision]:
        """What was decided for this loader so far and why, oldest first; see `dpex.autotune.types.Decision`."""
        return self._tuner.decisions if self._tuner is not None else []

    def _current_sizes(self) -> Sizes:
        tuner = self._tuning()
        if tuner is not None:
            return tuner.sizes
        return self._sizes if self._sizes is not None else self._static_sizes()

    def _static_sizes(self) -> Sizes:
        remote = self._is_distributed()
        workers = int(self.num_workers)
        prefetch = workers * (self.prefetch_factor or 0) if self._prefetch_is_given else None
        return Sizes(local=0 if remote else workers, remote=workers if remote else 0, prefetch=prefetch or None)

    def diagnose(self, *, reset: bool = False) -> Diagnosis:
        """Why training waits for data, if it does: a verdict with its evidence, where the time goes, and what would
        change it; see `dpex.diagnose.diagnosis.Diagnosis`. From any thread, also in the middle of an epoch.

        It is about all passes since the loader was made. ``reset``: the next one is about what comes from now on.
        With ``num_workers=0`` and no metrics, what is measured begins with the first call, or with ``DPEX_DIAGNOSE``.
        """
        case = self._case()
        self._is_asked = True
        found = case.diagnose()
        if reset:
            self._book.restart()
        return found

    def _case(self) -> Case:
        context = Context(
            name=encodable(self.name or ""),
            rank=rank(os.environ),
            dataset=encodable(type(self.dataset).__name__),
            batch_size=str(self.batch_size),
            is_fixed=self.seeding == "worker",
            has_cluster=self.distribute_mode is not False,
            note=self._why_unmeasured(),
            untimed="" if is_switched_on(os.environ) else f"${SWITCH} forbids it",
        )
        return Case(book=self._book, context=context, tuner=self._tuner)

    def _why_unmeasured(self) -> str:
        """Why that is, should no batch have been counted."""
        if self._why_torch() is not None or isinstance(self.dataset, (IterDataPipe, MapDataPipe)):
            return "anything: PyTorch's own iterators make the batches of this loader"
        if not self._is_asked and self.num_workers == 0:
            return "passes before this call: without workers it is measured from now on, or with DPEX_DIAGNOSE=1"
        return "anything: no batch was delivered yet"

    def _is_distributed(self) -> bool:
        if self.distribute_mode == "auto":
            from dpex.pools.ray.cluster import is_connected

            return is_connected()
        return bool(self.distribute_mode)

    def resize(self, local: int | None = None, remote: int | None = None, prefetch: int | None = None) -> None:
        """Change the workers on this machine, on the cluster, and the batches in flight at most; None leaves as it is.

        Takes effect at once, also in the middle of an epoch and from any thread: new workers take tickets as soon as
        they are up, leaving ones finish what they hold. For an iterable dataset the hosts change at the next
        ``iter()``, as a running stream cannot move. Where the loader tunes itself, what is named here is fixed from now
        on (``prefetch``: as the most), and the rest is tuned on.

        Raises:
            OptionError: a count that is no whole number, or ``prefetch < 1``.
            FixedWorkersError: another number of workers under ``seeding="worker"``, or where local ones are PyTorch's.
        """
        check_count("local", local)
        check_count("remote", remote)
        check_count("prefetch", prefetch, least=1)
        now = self._current_sizes()
        if self.seeding == "worker" or self._dataset_kind == _DatasetKind.Iterable:
            local, remote = self._split_of_fixed(now, local, remote)
        sizes = Sizes(
            local=now.local if local is None else local,
            remote=now.remote if remote is None else remote,
            prefetch=now.prefetch if prefetch is None else prefetch,
        )
        self._check_movable(sizes)
        tuner = self._tuning()
        if tuner is not None:
            named = {"local": local, "remote": remote, "prefetch": prefetch}
            self._pins |= {name: count for name, count in named.items() if count is not None}
            tuner.pin(self._pins)
            sizes = tuner.sizes
        else:
            self._sizes = sizes
        for iterator in list(self._iterators):
            iterator._engine.resize(sizes)

    def _check_movable(self, sizes: Sizes) -> None:
        """Whether there is anybody to carry that out."""
        why = self._why_torch()
        if why is not None and (sizes.remote == 0 or (sizes.local and sys.platform != "linux")):
            raise FixedWorkersError(
                f"resize() to {sizes.local} local and {sizes.remote} remote workers: local workers are PyTorch's "
                f"({why}), whose number and prefetch depth stay what the loader was made with. Make a new loader, or "
                "give remote workers only"
            )

    def _split_of_fixed(self, now: Sizes, local: int | None, remote: int | None) -> tuple[int, int]:
        total = int(self.num_workers)
        if local is None and remote is None:
            return now.local, now.remote
        if local is None:
            local = total - (remote or 0)
        if remote is None:
            remote = total - local
        if local + remote != total or min(local, remote) < 0:
            raise FixedWorkersError(
                f"resize(local={local}, remote={remote}) asks for {local + remote} workers, but seeding="
                f"{self.seeding!r} ties the random state to num_workers={total} logical workers: they can move between "
                'this machine and the cluster, but not change in number. With seeding="batch" any number gives the '
                "same batches"
            )
        return local, remote

    def stats(self) -> LoaderStats:
        """A snapshot of the latest iterator: workers by lane, queue depths, bytes and times (see `LoaderStats`).

        The figures of an iterator that has ended stay, whether it ended by itself, by ``break`` or by `close`.
        """
        return self._last_stats.read()


def _ray_is_up() -> bool:
    ray = sys.modules.get("ray")
    return ray is not None and bool(ray.is_initialized())


def _is_daemonic() -> bool:
    """Whether this process may not have children by `multiprocessing`: of a `Pool`, or a worker of torch's."""
    return multiprocessing.current_process().daemon


def _worker_count(num_workers: int | str) -> int:
    if isinstance(num_workers, str):
        if num_workers != "auto":
            raise OptionError(f"num_workers={num_workers!r}: give a whole number or 'auto'")
        return static_worker_count()
    return num_workers


def _streams(dataset: Any, autotune: AutotuneConfig | Literal[False] | None) -> Streams | None:
    """How many streams an iterable dataset is read in, where that is left to dpex; None of any other dataset."""
    if not isinstance(dataset, IterableDataset):
        return None
    most = autotune.max_streams if isinstance(autotune, AutotuneConfig) else None
    return choose(dataset, rank_cpus(), most, os.environ)
