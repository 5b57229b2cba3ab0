"""`DpexDataLoader`: torch's DataLoader with a changeable number of workers, on this machine or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, overload

import torch
from torch.utils.data import Dataset

from dpex._torch import HAS_IN_ORDER, BaseDataLoaderIter
from dpex.autotune.config import AutotuneConfig
from dpex.hints import with_hints
from dpex.loader.base_loader import BaseLoader, Samples, T_co
from dpex.loader.checks import (
    check_place,
    check_settings,
    check_torch_arguments,
    import_iterators,
    parsed_device,
    set_option,
    start_fork_server_early,
)
from dpex.loader.passes import diagnosis_source, new_iterator
from dpex.loader.sizing import TORCH_PREFETCH_FACTOR, Sizing, fix_workers
from dpex.loader.streams import streams_of
from dpex.loader.unused import count_as_used, warn_if_unused
from dpex.options import DEFAULTS, HELD, ClusterConfig, DeviceConfig, MetricsConfig, Seeding, WorkerConfig, checked
from dpex.schedule.names import is_asynchronous
from dpex.schedule.sample_policy import SamplePolicy
from dpex.system.compiler import never_traced
from dpex.system.cpus import static_worker_count

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from typing_extensions import Self  # torch needs the package

    from dpex.autotune.runtime.tuned import Tuned
    from dpex.autotune.types import Decision
    from dpex.diagnose.diagnosis import Diagnosis, DiagnosisSource
    from dpex.diagnose.job import JobDiagnosis
    from dpex.loader.runtime import LoaderRuntime
    from dpex.pools.base import MakesPool
    from dpex.stats import LoaderStats


def _new_runtime() -> LoaderRuntime:
    from dpex.loader.runtime import LoaderRuntime

    return LoaderRuntime()


@never_traced
class DpexDataLoader(BaseLoader[T_co]):
    """A drop-in `torch.utils.data.DataLoader` whose workers may be on other machines and may change during training.

    It takes torch's arguments in torch's order and with torch's meaning, and keyword-only arguments of dpex. Each
    argument is an attribute of the same name. With a fixed number of workers the batches are torch's, bit for bit. The
    type parameter is the type of a sample, as in torch, and type checkers see batches as ``Any``.

    Args:
        dataset: A map-style or an iterable dataset, as in torch.
        batch_size: Samples per batch, as in torch. None: samples are not collated.
        shuffle: True draws a new order in each epoch, as in torch.
        sampler: Draws the indices of samples, as in torch.
        batch_sampler: Draws the indices of batches, as in torch.
        num_workers: The number of workers, as in torch; 0 makes batches in the training process. ``"auto"``: dpex finds
            the number that speeds up training, on this machine and on the cluster, and adapts it during training.
        collate_fn: Makes a batch of samples, as in torch.
        pin_memory: True copies batches into page-locked memory, as in torch.
        drop_last: True leaves out a smaller last batch, as in torch.
        timeout: Seconds to wait for a batch, as in torch; 0: no limit.
        worker_init_fn: Called in each worker with its number, as in torch.
        multiprocessing_context: The start method of local workers, as in torch.
        generator: Draws the order and the base seed, as in torch.
        prefetch_factor: Batches per worker that are made ahead, as in torch; never exceeded if given.
        persistent_workers: True keeps workers between epochs, as in torch.
        pin_memory_device: The device for ``pin_memory``, as in torch.
        in_order: True delivers batches in the order of the sampler, as in torch.
        distribute_mode: The place of workers: this machine (False), the Ray cluster (True), or the cluster if this
            process is connected to a cluster, or can connect to a ``head_address`` that you give (``"auto"``).
        head_address: The cluster: ``"auto"`` (the connected cluster, else ``RAY_ADDRESS``, else a private cluster),
            ``"local"`` (a private cluster on this machine), or ``"host:port"``. This machine must be one of its nodes.
            If this process is connected to another cluster, ``iter()`` raises a ClusterError.
        seeding: ``"worker"``: random states as in torch, one for each logical worker. ``"batch"``: the random state of
            a batch depends only on the base seed, the epoch and the number of the batch, so that the number and the
            place of workers do not matter. The random state of an iterable dataset belongs to its streams under both.
            None: ``"batch"`` for ``"auto"``, an `AutotuneConfig`, ``WorkerConfig(share=...)`` and asynchronous
            datasets, otherwise ``"worker"``. ``"auto"`` refuses ``"worker"``, unless ``autotune=False``.
        autotune: None tunes ``num_workers="auto"`` with the defaults, and leaves a given number fixed. An
            `AutotuneConfig` tunes the number within its limits, starting from ``num_workers``. It needs
            ``seeding="batch"``, which is then the default. False tunes nothing, and ``"auto"`` chooses a number once.
            dpex never tunes the number of streams of an iterable dataset, because this number determines the samples.
            Under ``"auto"``, dpex makes one stream for each shard that the dataset names (``num_shards``, ``n_shards``,
            or the URLs of webdataset), up to ``AutotuneConfig(max_streams=...)`` (default: the larger of 8 and the CPUs
            of this rank). If the dataset names no shards, dpex makes one stream, and ``iter()`` warns. The prefetch and
            decoding workers are still tuned.
        device: The device on which batches arrive, such as ``"cuda"``, ``"cuda:1"`` or a `torch.device`. Without an
            index, it is the current device of the thread that calls ``iter()``. Workers' batches are copied there ahead
            of need, while training computes, and those of ``num_workers=0`` in ``next()``. None and ``"cpu"`` leave
            batches on the host.
        name: The name of this loader in its metrics; by default "loader-1", "loader-2" and so on.
        metrics_port: The port of the live page and of the metrics for Prometheus. If another process has the port, dpex
            takes a free port. 0 takes a free port, and prints the address on stderr. The endpoint exists from the first
            ``iter()`` until the loader is closed or deleted, and the loaders of a process share it. None:
            the port ``$DPEX_METRICS_PORT``; if it is not set, no metrics, unless ``metrics_config`` is given.
        worker_config: The memory of batches in flight, and shared batches; see `WorkerConfig`. None, here and below,
            means the defaults of that class.
        cluster_config: Ray's arguments of remote workers; see `ClusterConfig`.
        device_config: A transform on the ``device``, and its memory; see `DeviceConfig`.
        sample_policy: The treatment of samples that raise an error or take too long; see `SamplePolicy`.
        metrics_config: Address, directory for announcements and TLS of the metrics; see `MetricsConfig`. None means its
            defaults if ``metrics_port`` or ``$DPEX_METRICS_PORT`` asks for metrics.

    Raises:
        OptionError: An option of dpex has an invalid value. It is a ValueError.
        ValueError: An argument of torch has an invalid value, as in torch.
        TypeError: An argument of torch has a wrong type, as in torch.
        ClusterError: ``distribute_mode=True`` needs Ray, which is not installed (``pip install 'dpex[ray]'``).

    Examples:
        >>> import torch
        >>> from torch.utils.data import TensorDataset
        >>> from dpex import DpexDataLoader
        >>> dataset = TensorDataset(torch.arange(6))
        >>> with DpexDataLoader(dataset, batch_size=3, num_workers="auto") as loader:
        ...     for (numbers,) in loader:
        ...         print(numbers.tolist())
        [0, 1, 2]
        [3, 4, 5]
    """

    local_pool: ClassVar[MakesPool | None] = None
    """Factory of the pool of local workers, called with their setup and their number. None: dpex's own processes.

    A subclass may set it, see [Use workers of your own](../how-to/extend.md#workers). It needs ``seeding="batch"`` and
    a map-style dataset.
    """

    @with_hints(HELD)
    def __init__(
        self,
        dataset: Dataset[T_co] | Samples[T_co],
        batch_size: int | None = 1,
        shuffle: bool | None = None,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[list[Any]] | None = None,
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
        autotune: AutotuneConfig | Literal[False] | None = None,
        device: str | torch.device | None = None,
        name: str | None = None,
        metrics_port: int | None = None,
        worker_config: WorkerConfig | None = None,
        cluster_config: ClusterConfig | None = None,
        device_config: DeviceConfig | None = None,
        sample_policy: SamplePolicy | None = None,
        metrics_config: MetricsConfig | None = None,
    ) -> None:
        check_torch_arguments(dataset, num_workers, prefetch_factor, timeout, generator)
        given = {option: value for option, value in locals().items() if option in DEFAULTS}
        is_auto = num_workers == "auto"
        options = checked(given, is_auto=is_auto, is_asynchronous=is_asynchronous(dataset))
        options["device"] = parsed_device(options["device"])
        vars(self).update(options)
        streams = streams_of(self, dataset) if is_auto else None
        number = static_worker_count() if num_workers == "auto" else num_workers  # nothing has been measured yet
        count = number if streams is None else streams.count
        check_place(self)
        self._streams = streams
        self._chosen = count if is_auto else None
        self._settings = None
        self._pins = {}
        self._runtime = _new_runtime()
        super().__init__(
            dataset,  # type: ignore[arg-type]  # torch's loader takes lists, too
            batch_size=batch_size,
            shuffle=shuffle,
            sampler=sampler,
            batch_sampler=batch_sampler,
            num_workers=count,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            drop_last=drop_last,
            timeout=timeout,
            worker_init_fn=worker_init_fn,
            multiprocessing_context=multiprocessing_context,
            generator=generator,
            prefetch_factor=TORCH_PREFETCH_FACTOR if prefetch_factor is None and count else prefetch_factor,
            persistent_workers=persistent_workers,
            pin_memory_device=pin_memory_device,
            **({"in_order": in_order} if HAS_IN_ORDER else {}),
        )
        self.in_order = in_order
        self._is_auto = is_auto
        check_settings(self)
        start_fork_server_early(self)
        warn_if_unused(self)
        import_iterators(self)

    def __setattr__(self, attr: str, val: Any) -> None:
        if hasattr(self, "_is_auto"):  # the constructor has ended
            if attr == "num_workers":
                fix_workers(self, val)
            elif attr in DEFAULTS:
                val = set_option(self, attr, val)
        super().__setattr__(attr, val)

    def __getstate__(self) -> dict[str, Any]:
        count_as_used(self)
        return {name: val for name, val in vars(self).items() if name != "_runtime"} | {"_begun": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _runtime=_new_runtime())
        warn_if_unused(self)

    def _get_iterator(self) -> BaseDataLoaderIter:
        count_as_used(self)
        return new_iterator(self, super()._get_iterator)

    def close(self) -> None:
        """End all workers of all iterators of this loader. It may be called repeatedly. The loader stays usable.

        Agents on the cluster wait for another loader for a minute at most, and a private Ray that dpex started ends
        with its last loader. A loader is also a context manager that closes itself.
        """
        self._runtime.close()
        self._iterator = self._begun = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def check_worker_number_rationality(self) -> None:
        """Warn of more workers than CPUs, as torch does, but only if the user chose their number."""
        if self.num_workers != self._chosen:
            super().check_worker_number_rationality()

    def resize(self, local: int | None = None, remote: int | None = None, prefetch: int | None = None) -> None:
        """Change the number of workers and the prefetch at once, also in the middle of an epoch and from any thread.

        New workers take batches as soon as they run. Workers that leave finish their batches first. Under
        ``seeding="worker"``, and for iterable datasets without `decode_in_workers`, only the prefetch can change. If
        the loader tunes itself, the values given here are fixed from now on (``prefetch``: as a maximum). dpex
        continues to tune the other values.

        Args:
            local: The number of workers on this machine. None keeps it.
            remote: The number of workers on the cluster. None keeps it.
            prefetch: The maximum number of batches that are drawn and not yet delivered. None keeps it.

        Raises:
            OptionError: A count is not an integer of at least 0, ``prefetch`` is less than 1, or no worker would be
                left. Or the workers cannot change: under ``seeding="worker"``, with an iterable dataset, with
                PyTorch's own workers, or with ``num_workers=0``.
            ClusterError: The call asks for remote workers, and Ray is not installed.

        Examples:
            >>> import torch
            >>> from torch.utils.data import TensorDataset
            >>> from dpex import DpexDataLoader
            >>> dataset = TensorDataset(torch.arange(100))
            >>> with DpexDataLoader(dataset, num_workers=1, seeding="batch") as loader:
            ...     for number, batch in enumerate(loader):
            ...         if number == 10:
            ...             loader.resize(local=2, prefetch=6)
            ...     print(loader.stats().batches)
            100
        """
        Sizing(self).resize(local, remote, prefetch)

    def timeline(self, path: str | Path) -> AbstractContextManager[None]:
        """Record a timeline of the workers and the training loop within ``with``, and write it to a file at the end.

        The file is in Chrome's trace format, which https://ui.perfetto.dev shows. Each worker has a row with its
        batches and their stages. The training loop has a row with its calls of ``next()`` and its steps. The file has
        the latest 200,000 batches. Batches of other machines appear at the time of their arrival.

        Args:
            path: The file, such as ``"run.json"``; ``~`` is the home directory.

        Raises:
            OptionError: The loader has no workers of dpex, so there is nothing to record. ``with`` raises it, too,
                while the loader records another timeline.
            OSError: The file cannot be written. It is raised at the end of ``with``.
        """
        Sizing(self).check_recordable(path)
        return self._runtime.record_timeline(Path(path).expanduser())

    def stats(self) -> LoaderStats:
        """Return a snapshot of the latest iterator: workers by pool, batches in flight, bytes and times.

        The last snapshot remains after the iterator has ended, whether it was exhausted, left by ``break``, or closed.

        Returns:
            An immutable snapshot; see `LoaderStats`.
        """
        stats = self._runtime.stats()
        return replace(stats, streams=Sizing(self).with_shards(stats.streams)) if stats.streams else stats

    @property
    def decisions(self) -> list[Decision]:
        """The tuner's decisions about this loader with their reasons, the oldest first.

        The ``repr`` of the list has a line for each decision. See `dpex.Decision`.
        """
        return self._runtime.decisions

    @property
    def tuned(self) -> Tuned:
        """The workers and the prefetch that ``"auto"`` has found so far, or the fixed ones. See `dpex.Tuned`.

        Pass them to another run as ``AutotuneConfig(start=...)``. Each rank has its own values.
        """
        return Sizing(self).tuned()

    @property
    def metrics_url(self) -> str | None:
        """Address of the live page, such as ``"http://127.0.0.1:9400/"``, from the first ``iter()`` until the loader is
        closed; None without metrics."""
        return self._runtime.metrics_url

    @overload
    def diagnose(self, *, reset: bool = False, group: None = None) -> Diagnosis: ...

    @overload
    def diagnose(self, *, reset: bool = False, group: ProcessGroup) -> JobDiagnosis: ...

    def diagnose(self, *, reset: bool = False, group: Any = None) -> Diagnosis | JobDiagnosis:
        """Explain why training waits for data, and predict the effect of changes.

        Any thread may call it, also in the middle of an epoch. With ``num_workers=0`` and no metrics, measuring begins
        with the next ``iter()`` after the first call, except under ``dpex run`` and ``dpex diagnose``.

        Args:
            reset: True restarts the measurements, so that the next diagnosis covers the time from now on. By default a
                diagnosis covers all epochs of the loader.
            group: A process group, such as ``torch.distributed.group.WORLD``. The result is then the diagnosis of the
                job: the rank that starves it, since when, why, and the cost for all ranks. The call is a collective, so
                all ranks of the group must make it.

        Returns:
            A verdict with its evidence, the first step to take, and the changes that would end the wait. Its text is a
            report of one screen; ``full`` is the report with all tables.
        """
        source = self._diagnosis_source()
        self._runtime.is_diagnosed = True
        found = source.diagnose()
        if reset:
            source.restart()
        if group is None:
            return found
        from dpex.diagnose.gathering import of_group

        return of_group(found, group)

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the latest pass, after the batches that it has delivered.

        Batches that workers have made ahead do not count: a loader that loads the state delivers them, each once. Call
        this method in the thread that iterates. Before the first ``iter()``, it makes the iterator that ``iter()`` will
        return, as torchdata's StatefulDataLoader does. After an epoch, the state is the start of the next epoch.

        From the first call on, workers ask a dataset with a ``state_dict()`` for its state now and then. If the first
        call comes in the middle of an epoch of a stream, a run that resumes from the returned state reads the stream
        from its start, and discards the batches that were already delivered. For DataPipes, and for `decode_in_workers`
        with ``in_order=False``, the state has no position: a run that loads it warns, and begins the epoch anew.

        Returns:
            Dicts and lists of numbers, strings and tensors, of a few kilobytes, which `torch.save` and
            ``torch.load(weights_only=True)`` accept. States of the dataset and the sampler are included unchanged. The
            state contains no code, and dpex does not change it later.

        Raises:
            StateError: Another thread has been in ``next()`` for a second. Or an exception has interrupted ``next()``
                of a stream, or of a loader with ``in_order=False``.

        Examples:
            >>> from dpex import DpexDataLoader
            >>> loader = DpexDataLoader(range(6), batch_size=2)
            >>> for batch in loader:
            ...     state = loader.state_dict()
            ...     break
            >>> another = DpexDataLoader(range(6), batch_size=2)
            >>> another.load_state_dict(state)
            >>> [batch.tolist() for batch in another]
            [[2, 3], [4, 5]]
        """
        from dpex.loader.states import state_of

        return state_of(self)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Make the next ``iter()`` resume at the position of a state.

        A running iterator of this loader is abandoned. The number and the place of workers may differ from the saved
        run. Under ``seeding="worker"``, and for iterable datasets, the number must be the same. Under ``"auto"``
        this is the number of streams, which `AutotuneConfig` (``max_streams``) sets where machines have other CPUs.

        Args:
            state_dict: The result of `state_dict`, also of another process.

        Raises:
            StateError: The state is invalid, or belongs to another dataset, order, batch size, seed or number of
                workers. The message names the difference. It is a ValueError.
        """
        from dpex.loader.states import resume_from

        resume_from(self, state_dict)

    def __iter__(self) -> BaseDataLoaderIter:
        begun, self._begun = self._begun, None
        persistent: Any = self._iterator
        if getattr(persistent, "is_broken", False):
            persistent._shutdown_workers()
            self._iterator = None
        return super().__iter__() if begun is None else begun

    def __repr__(self) -> str:
        if not hasattr(self, "_is_auto"):  # the constructor has not ended
            return object.__repr__(self)
        title = f" {self.name}" if self.name else ""
        size = "" if self.batch_size is None else f", batch size {self.batch_size}"
        workers = '"auto"' if self._is_auto else self.num_workers
        kind = type(self.dataset).__name__
        return f"<{type(self).__name__}{title}: {kind}{size}, num_workers={workers}. {self._runtime.progress()}>"

    def _diagnosis_source(self) -> DiagnosisSource:
        return diagnosis_source(self)
