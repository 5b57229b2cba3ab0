"""dpex in training frameworks: serve their loaders, find the `DpexDataLoader` behind a loader, and log its figures."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch.utils.data import DataLoader

from dpex.dataloader import DpexDataLoader
from dpex.errors import OptionError
from dpex.loader.served import OF_DATA, OF_WORKERS, ON_DEMAND, StandIn, settings_of, stand_in_of, why_not_served
from dpex.loader.unused import count_as_used
from dpex.measure.readable import remainder
from dpex.measure.reading import wait_ratio
from dpex.options import DEFAULTS
from dpex.stats import LoaderStats

Write = Callable[[Mapping[str, float], int], None]
_INSIDE = ("base_dataloader", "_dataloader")
"""Attributes in which frameworks keep the wrapped loader: first Accelerate's, then that of Fabric and Ray Train."""
_MOST_WRAPPERS = 8
"""Maximum number of nested wrappers that are unwrapped. It ends the search in a loader that contains itself."""


def serve(
    loader: Any,
    num_workers: int | Literal["auto"] | None = None,
    *,
    like: DpexDataLoader[Any] | None = None,
    **options: Any,
) -> DpexDataLoader[Any]:
    """Let dpex make the batches of a loader of PyTorch's class, from its next ``iter()`` on.

    Use it where a framework has built a plain loader, as Accelerate and Ray Train do from yours. ``loader`` keeps its
    dataset, order, collate function, ``timeout``, ``pin_memory``, ``worker_init_fn`` and ``generator``, and is pickled
    as a plain loader. Its ``persistent_workers`` becomes False, because the `DpexDataLoader` keeps the workers.

    Args:
        loader: A `torch.utils.data.DataLoader`, or a wrapper of Accelerate, Fabric or Ray Train around it.
        num_workers: The number of workers. ``"auto"``: dpex finds it and adapts it. None: the number of ``like``, or
            ``"auto"`` without ``like``. A number that replaces the number of ``like`` is tuned only if you give
            ``autotune``.
        like: The `DpexDataLoader` from which the framework built ``loader``. It gives dpex's options, and PyTorch's
            ``prefetch_factor``, ``persistent_workers``, ``multiprocessing_context`` and ``in_order``, but not its
            state. None: these four options of PyTorch come from ``loader``.
        options: Options of dpex and the four of PyTorch above, by name. They win over ``like`` and over ``loader``.

    Returns:
        The `DpexDataLoader` that makes the batches. It has the statistics, the diagnosis and the state. If the
        framework has kept a `DpexDataLoader`, as Ray Train does with one training worker, it is returned as it is.

    Raises:
        OptionError: An option has an invalid value, or dpex cannot serve this loader.
        TypeError: The option does not exist.

    Examples:
        >>> import dpex
        >>> from torch.utils.data import DataLoader
        >>> loader = DataLoader(range(6), batch_size=3)
        >>> behind = dpex.serve(loader, num_workers="auto", name="train")
        >>> [batch.tolist() for batch in loader]
        [[0, 1, 2], [3, 4, 5]]
        >>> behind.stats().batches
        2
    """
    inner, given = _innermost(loader), options if num_workers is None else {"num_workers": num_workers, **options}
    if like is not None:
        _require(isinstance(like, DpexDataLoader), f"serve({loader!r}, like={like!r}): give a DpexDataLoader")
        count_as_used(like)
    if isinstance(inner, DpexDataLoader):
        _refuse(loader, given, "a DpexDataLoader has options of its own; give this one to its constructor")
        return inner
    _check_served(loader, inner)
    ignored = {name: given[name] for name in sorted(given.keys() & {"shuffle", *OF_DATA})}
    _refuse(loader, ignored, "the loader's own value applies; leave this option out, or make the loader with it")
    behind: DpexDataLoader[Any] = DpexDataLoader(inner.dataset, **_settings(inner, like, given))
    if like is not None and type(like).local_pool is not None:
        vars(behind)["local_pool"] = type(like).local_pool
    stand_in = StandIn(inner, behind)
    vars(inner).update({ON_DEMAND: stand_in, "_iterator": None, "persistent_workers": False})
    return stand_in.behind


def _check_served(loader: Any, inner: Any) -> None:
    """Raise OptionError if dpex cannot make the batches of the ``inner`` loader."""
    makes_its_own = getattr(type(inner), "_get_iterator", None) is not DataLoader._get_iterator
    reason = "its class makes iterators itself" if makes_its_own else why_not_served(inner)
    remedy = "Train with a DpexDataLoader"
    _require(reason is None, f"serve({loader!r}): dpex cannot make its batches: {reason}. {remedy}")


def _refuse(loader: Any, given: Mapping[str, Any], why: str) -> None:
    """Raise OptionError if any option is given."""
    for name, value in given.items():
        raise OptionError(f"serve({loader!r}, {name}={value!r}): {why}")


def _require(is_right: bool, message: str) -> None:
    if not is_right:
        raise OptionError(message)


def _settings(loader: DataLoader[Any], like: DpexDataLoader[Any] | None, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keyword arguments for the `DpexDataLoader` behind a loader."""
    settings: dict[str, Any] = {"num_workers": "auto"} | settings_of(loader)
    if like is not None:
        is_auto = like._is_auto and like._streams is None  # a framework's wrapper may hide the shards of a stream
        settings = {name: getattr(like, name) for name in DEFAULTS} | settings_of(like)
        settings |= {"num_workers": "auto" if is_auto else like.num_workers}
    if given.get("num_workers", "auto") != "auto":
        settings.pop("autotune", None)
    if given.get("num_workers", settings["num_workers"]) == 0:
        settings = {name: value for name, value in settings.items() if name not in OF_WORKERS}
    return settings | dict(given)


def loader_behind(loader: Any) -> DpexDataLoader[Any] | None:
    """Return the `DpexDataLoader` that makes the batches of a framework's loader; None if none does.

    Args:
        loader: A loader that was passed to `serve`, a loader of Lightning or Fabric, a loader of PyTorch's own class
            under ``dpex run``, or a wrapper around one of these. A `DpexDataLoader` is returned as it is.

    Returns:
        The loader to use for ``decisions``, ``stats()``, ``diagnose()``, ``resize()`` and ``close()``.
    """
    inner = _innermost(loader)
    stand_in = stand_in_of(inner)
    behind: DpexDataLoader[Any] | None = None if stand_in is None else stand_in.behind
    return inner if isinstance(inner, DpexDataLoader) else behind


def _innermost(loader: Any) -> Any:
    """Return the loader inside a framework's wrappers."""
    for _ in range(_MOST_WRAPPERS):
        attributes = {} if isinstance(loader, DpexDataLoader) else getattr(loader, "__dict__", {})
        inside = [attributes[name] for name in _INSIDE if name in attributes]
        if not inside:
            break
        loader = inside[0]
    return loader


# -- figures -----------------------------------------------------------------------------------------------------------


class LoaderFigures:
    """Measures the figures of one loader, from one call of `take_figures` to the next. It keeps the loader alive."""

    def __init__(self, loader: Any) -> None:
        behind = loader_behind(loader)
        if behind is None:
            raise OptionError(
                f"{loader!r} is no DpexDataLoader, and no DpexDataLoader makes its batches: give a DpexDataLoader, or "
                "first call dpex.serve(loader)"
            )
        self.loader: DpexDataLoader[Any] = behind
        self._last = LoaderStats()
        self._pass: Any = None

    def take_figures(self) -> dict[str, float]:
        """Return the measured figures since the last call, by name; without a new batch, no shares and no rate.

        - ``wait_ratio``: Share of the time in which the training loop waited in ``next()``, 0 to 1.
        - ``gpu_stall_ratio``: Share of the time in which the GPU was idle because data was missing, 0 to 1.
        - ``batches_per_s``: Batches delivered per second.
        - ``workers``: Running workers.
        - ``prefetch``: The maximum number of batches that are drawn and not yet delivered.
        - ``decisions``: Count of the tuner's decisions.
        """
        source, now = self.loader._runtime.last_stats, self.loader.stats()
        is_same = source is self._pass and now.batches >= self._last.batches
        last = self._last if is_same else LoaderStats()  # the counts of each iterator begin at 0
        is_later = now.batches > last.batches
        self._pass, self._last = source, now if is_later else last
        waited_s, worked_s = remainder(now.wait_s, last.wait_s), remainder(now.work_s, last.work_s)
        passed_s = waited_s + worked_s
        found: dict[str, float] = {"decisions": len(self.loader.decisions), "prefetch": now.prefetch}
        found["workers"] = sum(pool.running for pool in now.pools.values())
        if is_later and passed_s > 0:
            found["wait_ratio"] = wait_ratio(waited_s, worked_s)
            found["batches_per_s"] = (now.batches - last.batches) / passed_s
            if now.gpu_stall_s is not None:
                found["gpu_stall_ratio"] = remainder(now.gpu_stall_s, last.gpu_stall_s or 0.0) / passed_s
        prefix = f"dpex/{self.loader.name}" if self.loader.name else "dpex"
        return {f"{prefix}/{name}": float(value) for name, value in found.items()}


def diagnosis_of(loader: Any) -> str:
    """Return the report to print at the end of training; "" where dpex does not make the batches."""
    behind = loader_behind(loader)
    return "" if behind is None else str(behind.diagnose())


def write_to(writer: Any) -> Write:
    """Return a function that writes figures to ``writer``.

    Raises:
        OptionError: The type of ``writer`` is not supported.
    """
    if hasattr(writer, "add_scalar"):
        return lambda values, step: _to_tensorboard(writer, values, step)
    if hasattr(writer, "log_metrics"):
        return lambda values, step: writer.log_metrics(dict(values), step=step)
    if hasattr(writer, "create_gauge"):
        return _to_gauges(writer)
    if callable(getattr(writer, "log", None)):
        return lambda values, step: writer.log(dict(values), step=step)
    if callable(writer):
        return lambda values, step: writer(dict(values), step)
    raise OptionError(
        f"log_to({writer!r}): give a TensorBoard SummaryWriter, a W&B run, mlflow, a logger of Lightning, an "
        "OpenTelemetry Meter, or a function of a dict and a step"
    )


def _to_tensorboard(writer: Any, values: Mapping[str, float], step: int) -> None:
    for name, value in values.items():
        writer.add_scalar(name, value, step)


def _to_gauges(meter: Any) -> Write:
    """Return a function that sets gauges of an OpenTelemetry `Meter`, named with dots. Gauges take no step."""
    gauge = functools.cache(lambda name: meter.create_gauge(name.replace("/", ".")))

    def write(values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            gauge(name).set(value)

    return write


def log_to(writer: Any, *loaders: Any) -> Callable[[int], None]:
    """Return a function that writes the loaders' figures for the time since its last call.

    Each name is ``dpex/``, the loader's name, if it has one, and the figure: ``wait_ratio``, ``batches_per_s``,
    ``workers``, ``prefetch``, ``decisions``, and with a GPU ``gpu_stall_ratio``.

    Args:
        writer: A TensorBoard ``SummaryWriter``, a W&B run or module, the module ``mlflow``, a Lightning logger, an
            OpenTelemetry ``Meter``, or a function of a dict and a step.
        loaders: `DpexDataLoader`s, or framework wrappers.

    Returns:
        A function of the step's number. Call it regularly, such as every 100 steps.

    Raises:
        OptionError: The writer has another type, or dpex does not make the batches of a loader.

    Examples:
        >>> from dpex import DpexDataLoader, log_to
        >>> loader = DpexDataLoader(range(4), num_workers=1, name="train")
        >>> log = log_to(lambda values, step: print(step, sorted(values)[0]), loader)
        >>> for step, batch in enumerate(loader):
        ...     if step == 3:
        ...         log(step)
        3 dpex/train/batches_per_s
    """
    write, readings = write_to(writer), [LoaderFigures(loader) for loader in loaders]

    def log(step: int) -> None:
        for one in readings:
            write(one.take_figures(), step)

    return log
